"""From an image file to an embedding in memory: preprocessing process, then vision tower."""

import asyncio
import time
from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt

from epd.encoding.embedding import EmbeddingSpec
from epd.encoding.encode_batcher import EncodeBatcher, EncodeJob, EncodeOutcome, Vision
from epd.encoding.encode_events import Stage
from epd.encoding.encoding_config import EncodingConfig
from epd.encoding.pixel_budget import PixelBudget
from epd.encoding.preprocess import PreprocessPool
from epd.encoding.preprocess_worker import ProcessedImage
from epd.engine.families.base import ModelFamily
from epd.errors import InternalError
from epd.media import Media, Video
from epd.telemetry import semconv

#: How errors name the image; the call that waits for it adds its position.
IMAGE = "the image"
VIDEO = "the video"


class EmbeddingMaker:
    """Joins the preprocessing pool and the encode batcher. Lives on one event loop.

    Args:
        family: Reads the processor's output.
        vision: The vision half.
        config: Bounds.
        threads: Torch threads of the vision half.
        on_fatal: Called on the event loop when the batcher's thread has died.
    """

    def __init__(
        self,
        family: ModelFamily,
        vision: Vision,
        config: EncodingConfig,
        threads: int,
        on_fatal: Callable[[BaseException], None],
    ) -> None:
        self._family = family
        self._jpeg_draft = config.jpeg_draft
        self._on_fatal = on_fatal
        self.pool = PreprocessPool(config.preprocess(family.folder))
        self.batcher = EncodeBatcher(
            vision, config.batcher(threads), self._deliver, self._report_fatal
        )
        # Ageing in patches becomes ageing in bytes by the size of an ordinary patch.
        self._pixels = PixelBudget(config.pixel_bytes, config.ageing_patches_per_s * 4096)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._outcomes: dict[EncodeJob, asyncio.Future[EncodeOutcome]] = {}

    async def start(self) -> None:
        """Starts processes and thread. Raises UnavailableError when a process does not come up."""
        self._loop = asyncio.get_running_loop()
        await self.pool.start()
        self.batcher.start()

    async def stop(self, timeout_s: float) -> bool:
        """Fails what waits; False when the running batch did not end in time."""
        stopped = await asyncio.to_thread(self.batcher.stop, timeout_s)
        await self.pool.stop()
        return stopped

    async def make(
        self, data: Media, spec: EmbeddingSpec, memory: npt.NDArray[np.uint8]
    ) -> tuple[Stage, ...]:
        """Fills ``memory`` with the embedding of an image or video; returns the stages in between.

        However it ends, nobody writes to ``memory`` any more: a cancelled caller is held until the
        batcher has let go of it, which takes at most a forward pass.

        Raises:
            InvalidRequestError: the file is broken behind its header.
            DeadlineExceededError, InternalError, UnavailableError: see PreprocessPool.process and
                EncodeBatcher.
        """
        started_ns = time.monotonic_ns()
        async with self._pixels.hold(_pixel_bytes(spec)):
            processed = await self._processed(data, spec)
            preprocessed_ns = time.monotonic_ns()
            pixels = self._family.pixel_input(processed.arrays)
            if pixels.grid != spec.plan.grid:
                raise InternalError(f"planned as {spec.plan.grid}, preprocessed to {pixels.grid}")
            outcome = await self._encode(EncodeJob(pixels, spec, memory))
        if outcome.error is not None:
            raise outcome.error
        begin_ns = max(started_ns, preprocessed_ns - processed.duration_ns)
        return (
            Stage(semconv.SPAN_QUEUE, started_ns, begin_ns),
            Stage(semconv.SPAN_PREPROCESS, begin_ns, preprocessed_ns),
            Stage(semconv.SPAN_QUEUE, preprocessed_ns, outcome.started_ns),
            Stage(semconv.SPAN_ENCODE, outcome.started_ns, outcome.ended_ns),
        )

    async def _processed(self, data: Media, spec: EmbeddingSpec) -> ProcessedImage:
        if isinstance(data, Video):
            settings = self._family.frame_settings(spec.plan.grid)
            return await self.pool.process(data, VIDEO, frames=settings)
        draft_size = self._family.pixel_size(spec.plan.grid) if self._jpeg_draft else None
        return await self.pool.process(data, IMAGE, draft_size)

    async def _encode(self, job: EncodeJob) -> EncodeOutcome:
        assert self._loop is not None, "not started"
        outcome: asyncio.Future[EncodeOutcome] = self._loop.create_future()
        self._outcomes[job] = outcome
        try:
            self.batcher.submit(job)
        except BaseException:
            del self._outcomes[job]
            raise
        cancelled = None
        while not outcome.done():
            try:
                await asyncio.shield(outcome)
            except asyncio.CancelledError as error:
                cancelled = error
                self.batcher.cancel(job)
        if cancelled is not None:
            raise cancelled
        return outcome.result()

    def _deliver(self, outcomes: Sequence[EncodeOutcome]) -> None:
        """On the batcher's thread: one crossing to the event loop per batch."""
        assert self._loop is not None
        self._loop.call_soon_threadsafe(self._resolve, outcomes)

    def _resolve(self, outcomes: Sequence[EncodeOutcome]) -> None:
        for outcome in outcomes:
            self._outcomes.pop(outcome.job).set_result(outcome)

    def _report_fatal(self, error: BaseException) -> None:
        assert self._loop is not None
        self._loop.call_soon_threadsafe(self._on_fatal, error)


def _pixel_bytes(spec: EmbeddingSpec) -> int:
    """An estimate before preprocessing: a patch takes about as much as 4 KiB."""
    temporal, height, width = spec.plan.grid
    return temporal * height * width * 4096
