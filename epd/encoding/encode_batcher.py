"""The thread that runs the vision tower on micro-batches of images."""

import logging
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch

from epd.encoding.embedding import EmbeddingSpec
from epd.encoding.work_queue import WorkQueue
from epd.engine.families.base import PixelInput
from epd.errors import EpdError, InternalError, RequestCancelledError, UnavailableError
from epd.thread_slices import compute_patiently

logger = logging.getLogger(__name__)


class Vision(Protocol):
    """What is driven: :class:`epd.engine.vision_runner.VisionRunner`."""

    def encode(self, images: Sequence[PixelInput]) -> list[torch.Tensor]:
        """Embeddings [tokens, features] of the images in order, sizes mixed freely."""


@dataclass(frozen=True)
class BatcherConfig:
    """Bounds of a micro-batch. A single image may exceed ``patch_budget``; it runs alone.

    ``ageing_patches_per_s`` is how many patches a waiting image may be heavier per second of
    waiting and still go first.
    """

    patch_budget: int = 4096
    max_batch: int = 16
    ageing_patches_per_s: float = 4096.0
    threads: int = 1


@dataclass(eq=False)
class EncodeJob:
    """One image on its way through the tower.

    ``memory`` is written by the batcher's thread alone until the job's outcome is delivered, so it
    must not be given to anybody before, not even after a cancel.
    """

    pixels: PixelInput
    spec: EmbeddingSpec
    memory: npt.NDArray[np.uint8]
    cancelled: bool = False


@dataclass(frozen=True)
class EncodeOutcome:
    """The end of a job; times are ``time.monotonic_ns`` around its forward pass, 0 without one."""

    job: EncodeJob
    error: EpdError | None
    started_ns: int = 0
    ended_ns: int = 0


class EncodeBatcher:
    """Least work first with ageing; every submitted job gets exactly one outcome.

    Callers bound the number of jobs. ``deliver`` is called on this thread, once per batch. When the
    thread dies every job fails, ``fatal_error`` tells why and ``on_fatal`` is called.
    """

    def __init__(
        self,
        vision: Vision,
        config: BatcherConfig,
        deliver: Callable[[Sequence[EncodeOutcome]], None],
        on_fatal: Callable[[BaseException], None] = lambda error: None,
    ) -> None:
        self._vision = vision
        self._config = config
        self._deliver = deliver
        self._on_fatal = on_fatal
        self._wake = threading.Condition()  # guards _queue, _running and _stopping
        self._queue: WorkQueue[EncodeJob] = WorkQueue(config.ageing_patches_per_s)
        self._running: list[EncodeJob] = []
        self._stopping = False
        self._thread = threading.Thread(target=self._main, name="encode-batcher", daemon=True)
        self.fatal_error: BaseException | None = None
        self.forwards = 0
        self.encoded_images = 0
        self.encoded_patches = 0

    def start(self) -> None:
        """Starts the thread."""
        self._thread.start()

    def stop(self, timeout_s: float) -> bool:
        """Fails what waits, lets the running batch end; False when it did not in time."""
        with self._wake:
            self._stopping = True
            self._wake.notify()
        if self._thread.is_alive():
            self._thread.join(timeout_s)
        return not self._thread.is_alive()

    @property
    def waiting_images(self) -> int:
        """Images queued for the tower."""
        return len(self._queue)

    @property
    def waiting_patches(self) -> int:
        """Patches queued for the tower."""
        return self._queue.work

    @property
    def running_images(self) -> int:
        """Images in the forward pass."""
        return len(self._running)

    def submit(self, job: EncodeJob) -> None:
        """Queues a job.

        Raises:
            UnavailableError: the thread is stopping or dead.
        """
        with self._wake:
            if self._stopping or self.fatal_error is not None:
                raise UnavailableError("the encoder has stopped", reason="ENCODER_STOPPED")
            self._queue.push(job, len(job.pixels.patches), time.monotonic())
            self._wake.notify()

    def cancel(self, job: EncodeJob) -> None:
        """Ends a job that waits; one that runs ends with its batch. Both have an outcome."""
        with self._wake:
            job.cancelled = True
            self._wake.notify()

    def _main(self) -> None:
        compute_patiently()
        try:
            torch.set_num_threads(self._config.threads)
            while self._next_batch():
                self._run(self._running)
            self._fail_all(UnavailableError("the encoder has stopped", reason="ENCODER_STOPPED"))
        except BaseException as error:
            logger.critical("the encode batcher died", exc_info=error)
            with self._wake:
                self.fatal_error = error
            self._fail_all(UnavailableError("the encoder has failed", reason="ENCODER_FAILED"))
            self._on_fatal(error)

    def _next_batch(self) -> bool:
        """Waits for jobs and moves some to ``_running``; False when it is time to stop."""
        with self._wake:
            while True:
                cancelled = self._queue.discard(lambda job: job.cancelled)
                if cancelled or self._stopping or len(self._queue):
                    break
                self._wake.wait()
            if not self._stopping:
                self._running = self._queue.pop_batch(
                    self._config.patch_budget, self._config.max_batch
                )
            stopping = self._stopping
        if cancelled:
            gone = RequestCancelledError("nobody waits for this image any more")
            self._deliver([EncodeOutcome(job, gone) for job in cancelled])
        return not stopping

    def _run(self, jobs: Sequence[EncodeJob]) -> None:
        if not jobs:
            return
        started_ns = time.monotonic_ns()
        errors = self._encode(jobs)
        ended_ns = time.monotonic_ns()
        self._running = []  # first: who has an outcome may look at the load at once
        self._deliver(
            [
                EncodeOutcome(job, error, started_ns, ended_ns)
                for job, error in zip(jobs, errors, strict=True)
            ]
        )

    def _encode(self, jobs: Sequence[EncodeJob]) -> list[EpdError | None]:
        self.forwards += 1
        self.encoded_images += len(jobs)
        self.encoded_patches += sum(len(job.pixels.patches) for job in jobs)
        try:
            embeddings = self._vision.encode([job.pixels for job in jobs])
        except Exception as error:
            if len(jobs) > 1:  # one bad image must not take its neighbours down
                return [error for job in jobs for error in self._encode([job])]
            logger.exception("the vision tower failed")
            return [InternalError(f"the vision tower failed: {error!r}")]
        return [_store(job, embedding) for job, embedding in zip(jobs, embeddings, strict=True)]

    def _fail_all(self, error: EpdError) -> None:
        with self._wake:
            jobs = self._running + self._queue.discard(lambda job: True)
            self._running = []
        if jobs:
            self._deliver([EncodeOutcome(job, error) for job in jobs])


def embedding_tensor(memory: npt.NDArray[np.uint8], spec: EmbeddingSpec) -> torch.Tensor:
    """The bytes of an embedding as a tensor of its shape, without a copy."""
    return torch.from_numpy(memory).view(getattr(torch, spec.dtype)).view(spec.shape)


def _store(job: EncodeJob, embedding: torch.Tensor) -> EpdError | None:
    """Checks an embedding and writes it to its place."""
    if tuple(embedding.shape) != job.spec.shape:
        return InternalError(
            f"the vision tower made {list(embedding.shape)} of an image planned as "
            f"{list(job.spec.shape)}"
        )
    if not torch.isfinite(embedding).all():
        return InternalError("the vision tower made an embedding that is not finite")
    embedding_tensor(job.memory, job.spec).copy_(embedding)
    return None
