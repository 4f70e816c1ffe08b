"""Preprocessing in worker processes: decoding and resizing never run on the event loop.

Each lane is one process with one image in it, so a crash or a hang fails exactly the image that
caused it, and only that lane's process is replaced.
"""

import asyncio
import contextlib
import logging
import multiprocessing
import os
import signal
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, field
from pathlib import Path

from epd.encoding import preprocess_worker
from epd.encoding.image_limits import ImageLimits
from epd.encoding.preprocess_worker import ProcessedImage, RefusedImage
from epd.errors import DeadlineExceededError, InternalError, InvalidRequestError, UnavailableError

logger = logging.getLogger(__name__)

#: File, path in the request, size for a draft.
_Image = tuple[bytes, str, tuple[int, int] | None]


@dataclass(frozen=True)
class PreprocessConfig:
    """Size and bounds of the pool. ``memory_bytes`` bounds each process's address space."""

    model_folder: Path
    limits: ImageLimits = field(default_factory=ImageLimits)
    processes: int = 1
    timeout_s: float = 30.0
    start_timeout_s: float = 60.0
    memory_bytes: int = 4 * 1024**3


class PreprocessPool:
    """Runs image files through the model's own image processor, ``processes`` at a time.

    Callers bound how many images they hand in; those beyond the free processes wait in order.
    """

    def __init__(self, config: PreprocessConfig) -> None:
        self._config = config
        self._lanes = [_Lane(config) for _ in range(config.processes)]
        self._free: asyncio.Queue[_Lane] = asyncio.Queue()
        self._jobs: set[asyncio.Task[None]] = set()
        self.restarts = 0

    async def start(self) -> None:
        """Starts all processes. Raises UnavailableError when one does not come up."""
        async with asyncio.TaskGroup() as group:
            for lane in self._lanes:
                group.create_task(lane.start())
        for lane in self._lanes:
            self._free.put_nowait(lane)

    async def stop(self) -> None:
        """Ends all processes, whatever they are doing, and waits until they are gone."""
        for job in self._jobs:
            job.cancel()
        await asyncio.gather(*self._jobs, return_exceptions=True)
        for lane in self._lanes:
            await asyncio.to_thread(lane.kill, wait=True)

    async def process(
        self, data: bytes, field: str, draft_size: tuple[int, int] | None = None
    ) -> ProcessedImage:
        """Decodes and processes one image file.

        A cancelled caller leaves at once; its process is free again when the image is through.

        Args:
            data: The file.
            field: Path of the image in the request, named in errors.
            draft_size: Size (width, height) that the image processor resizes to; a JPEG file much
                larger than that may then be decoded coarsely.

        Raises:
            InvalidRequestError: the file is not a readable image.
            DeadlineExceededError: it took longer than ``timeout_s``; its process was killed.
            InternalError: the process crashed or its image processor failed.
            UnavailableError: no process can be started.
        """
        lane = await self._free.get()
        result: asyncio.Future[ProcessedImage] = asyncio.get_running_loop().create_future()
        image = (data, field, draft_size)
        job = asyncio.create_task(self._run(lane, image, result))
        self._jobs.add(job)
        job.add_done_callback(self._jobs.discard)
        return await result

    async def _run(
        self, lane: "_Lane", image: _Image, result: "asyncio.Future[ProcessedImage]"
    ) -> None:
        try:
            outcome = await self._processed(lane, image)
            if not result.done():
                result.set_result(outcome)
        except asyncio.CancelledError:
            result.cancel()
            raise
        except Exception as error:
            if not result.done():
                result.set_exception(error)
        try:
            # The caller has its error; the next one should not pay for the new process.
            await lane.ensure_started()
        except UnavailableError:
            logger.exception("preprocessing process does not start; the next image tries again")
        finally:
            self._free.put_nowait(lane)

    async def _processed(self, lane: "_Lane", image: _Image) -> ProcessedImage:
        data, field, _ = image
        try:
            outcome = await lane.process(image)
        except BrokenProcessPool as error:
            self.restarts += 1
            lane.discard()
            logger.error("preprocessing process crashed on %s of %d bytes", field, len(data))
            raise InternalError(f"preprocessing crashed on {field}") from error
        except TimeoutError as error:
            self.restarts += 1
            lane.kill()
            raise DeadlineExceededError(
                f"preprocessing of {field} took longer than {self._config.timeout_s:g} s",
                reason="PREPROCESS_TIMEOUT",
            ) from error
        except UnavailableError:
            raise
        except Exception as error:
            raise InternalError(f"the image processor failed on {field}: {error!r}") from error
        if isinstance(outcome, RefusedImage):
            raise InvalidRequestError(outcome.message, field=outcome.field, reason=outcome.reason)
        return outcome


class _Lane:
    """One worker process; a new one takes its place after :meth:`kill`."""

    def __init__(self, config: PreprocessConfig) -> None:
        self._config = config
        self._executor: ProcessPoolExecutor | None = None
        self._process_id: int | None = None

    async def start(self) -> None:
        """Starts the process and waits until its image processor is loaded."""
        config = self._config
        self._executor = ProcessPoolExecutor(
            max_workers=1,
            mp_context=multiprocessing.get_context("spawn"),
            initializer=preprocess_worker.initialize,
            initargs=(config.model_folder, config.limits, config.memory_bytes),
        )
        try:
            async with asyncio.timeout(config.start_timeout_s):
                self._process_id = await asyncio.get_running_loop().run_in_executor(
                    self._executor, preprocess_worker.process_id
                )
        except (BrokenProcessPool, TimeoutError, OSError) as error:
            self.discard()
            raise UnavailableError("a preprocessing process did not start") from error

    async def ensure_started(self) -> None:
        """Starts the process unless it runs."""
        if self._executor is None:
            await self.start()

    async def process(self, image: _Image) -> ProcessedImage | RefusedImage:
        """Raises BrokenProcessPool when the process dies and TimeoutError when it hangs."""
        await self.ensure_started()
        assert self._executor is not None
        async with asyncio.timeout(self._config.timeout_s):
            return await asyncio.get_running_loop().run_in_executor(
                self._executor, preprocess_worker.process, *image
            )

    def kill(self, *, wait: bool = False) -> None:
        """Ends a live process, whatever it does; with ``wait`` returns when it is gone."""
        if self._process_id is not None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._process_id, signal.SIGKILL)
        self.discard(wait=wait)

    def discard(self, *, wait: bool = False) -> None:
        """Forgets a process that is dead already or was never up."""
        executor, self._executor, self._process_id = self._executor, None, None
        if executor is not None:
            executor.shutdown(wait=wait, cancel_futures=True)
