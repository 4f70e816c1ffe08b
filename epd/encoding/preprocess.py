"""Preprocessing in worker processes: decoding and resizing never run on the event loop.

Each lane is one process with one image in it, so a crash or a hang fails exactly the image that
caused it, and only that lane's process is replaced.
"""

import asyncio
import logging

from epd.encoding.preprocess_config import PreprocessConfig
from epd.encoding.preprocess_lane import LaneBrokenError, PreprocessLane
from epd.encoding.preprocess_worker import FailedImage, Job, ProcessedImage, RefusedImage
from epd.engine.families.base import FrameSettings
from epd.errors import DeadlineExceededError, InternalError, InvalidRequestError, UnavailableError
from epd.media import Media, media_files

logger = logging.getLogger(__name__)


class PreprocessPool:
    """Runs image files through the model's own image processor, ``processes`` at a time.

    Callers bound how many images they hand in; those beyond the free processes wait in order.
    """

    def __init__(self, config: PreprocessConfig) -> None:
        self._config = config
        self._lanes = [PreprocessLane(config) for _ in range(config.processes)]
        self._free: asyncio.Queue[PreprocessLane] = asyncio.Queue()
        self._jobs: set[asyncio.Task[None]] = set()
        self._stopping = False
        self.restarts = 0

    async def start(self) -> None:
        """Starts all processes. Raises UnavailableError when one does not come up."""
        async with asyncio.TaskGroup() as group:
            for lane in self._lanes:
                group.create_task(lane.ensure_started())
        for lane in self._lanes:
            self._free.put_nowait(lane)

    async def stop(self) -> None:
        """Ends all processes, whatever they are doing, and waits until they are gone."""
        self._stopping = True
        for job in self._jobs:
            job.cancel()
        await asyncio.gather(*self._jobs, return_exceptions=True)
        for lane in self._lanes:
            await lane.stop()

    async def process(
        self,
        data: Media,
        field: str,
        draft_size: tuple[int, int] | None = None,
        frames: FrameSettings | None = None,
    ) -> ProcessedImage:
        """Decodes and processes one image file, or the frames of one video.

        A cancelled caller leaves at once; its process is free again when the image is through.

        Args:
            data: The file, or the video.
            field: Path of the image in the request, named in errors.
            draft_size: Size (width, height) that the image processor resizes to; a JPEG file much
                larger than that may then be decoded coarsely.
            frames: For a video, how its frames are treated.

        Raises:
            InvalidRequestError: the file is not a readable image.
            DeadlineExceededError: it took longer than ``timeout_s``; its process was killed.
            InternalError: the process crashed or its image processor failed.
            UnavailableError: no process can be started, or the pool has stopped.
        """
        lane = await self._free.get()
        if self._stopping:
            self._free.put_nowait(lane)  # the next who waits hears of it too
            raise UnavailableError("the encoder has stopped", reason="ENCODER_STOPPED")
        result: asyncio.Future[ProcessedImage] = asyncio.get_running_loop().create_future()
        image = Job(data, field, draft_size, frames)
        job = asyncio.create_task(self._run(lane, image, result))
        self._jobs.add(job)
        job.add_done_callback(lambda job: self._end(job, lane, result))
        return await result

    def _end(
        self,
        job: "asyncio.Task[None]",
        lane: PreprocessLane,
        result: "asyncio.Future[ProcessedImage]",
    ) -> None:
        """Also for a job that was cancelled before its first step, which runs no ``finally``."""
        self._jobs.discard(job)
        self._free.put_nowait(lane)
        result.cancel()

    async def _run(
        self, lane: PreprocessLane, image: Job, result: "asyncio.Future[ProcessedImage]"
    ) -> None:
        try:
            outcome = await self._processed(lane, image)
            if not result.done():
                result.set_result(outcome)
        except Exception as error:
            if not result.done():
                result.set_exception(error)
        try:
            # The caller has its error; the next one should not pay for the new process.
            await lane.ensure_started()
        except UnavailableError:
            logger.exception("preprocessing process does not start; the next image tries again")

    async def _processed(self, lane: PreprocessLane, image: Job) -> ProcessedImage:
        field = image.field
        try:
            outcome = await lane.process(image)
        except LaneBrokenError as error:
            self.restarts += 1
            lane.kill()
            size = sum(map(len, media_files(image.media)))
            logger.error("preprocessing process crashed on %s of %d bytes", field, size)
            raise InternalError(f"preprocessing crashed on {field}") from error
        except TimeoutError as error:
            self.restarts += 1
            lane.kill()
            raise DeadlineExceededError(
                f"preprocessing of {field} took longer than {self._config.timeout_s:g} s",
                reason="PREPROCESS_TIMEOUT",
            ) from error
        if isinstance(outcome, FailedImage):
            raise InternalError(f"the image processor failed on {field}: {outcome.error}")
        if isinstance(outcome, RefusedImage):
            raise InvalidRequestError(outcome.message, field=outcome.field, reason=outcome.reason)
        return outcome
