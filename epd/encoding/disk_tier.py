"""A second, larger cache tier on disk, which survives a restart."""

import asyncio
import logging
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from epd.encoding.disk_folder import DiskFolder
from epd.encoding.disk_index import DiskIndex
from epd.encoding.disk_record import DamagedRecordError, record_bytes
from epd.encoding.embedding import EmbeddingSpec

logger = logging.getLogger(__name__)

T = TypeVar("T")

_READERS = 2
_CLOSE_TIMEOUT_S = 5.0


@dataclass(frozen=True)
class DiskTierConfig:
    """``folder`` belongs to one process at a time; at most ``max_writes`` embeddings wait."""

    folder: Path
    capacity_bytes: int
    max_writes: int


@dataclass
class DiskCounters:
    """Embeddings since the start: looked up, found whole, written, not written, found damaged."""

    queries: int = 0
    hits: int = 0
    writes: int = 0
    dropped: int = 0
    damaged: int = 0


class DiskTier:
    """Accounts live on the event loop, files are touched on threads of its own.

    So a slow disk delays the images that it holds and nothing else. A disk that fails costs hits,
    never a request.
    """

    def __init__(self, config: DiskTierConfig) -> None:
        self._max_writes = config.max_writes
        self._folder = DiskFolder(config.folder)
        self._index = DiskIndex(config.capacity_bytes)
        self._readers = ThreadPoolExecutor(_READERS, thread_name_prefix="embedding-disk-read")
        # One thread: what is to be removed is gone before what is written next takes its place.
        self._writer = ThreadPoolExecutor(1, thread_name_prefix="embedding-disk-write")
        self._writing: dict[bytes, asyncio.Future[None]] = {}
        self.counters = DiskCounters()

    @property
    def used_bytes(self) -> int:
        """Bytes on disk, those being written included."""
        return self._index.used_bytes

    async def open(self) -> None:
        """Takes the folder and finds what earlier processes have left there.

        Raises:
            UnavailableError: another process has it, or it cannot be used.
        """
        self._remove(self._index.fill(await _run(self._writer, self._folder.take)))

    def holds(self, digest: bytes) -> bool:
        """Whether the embedding is on disk or on its way."""
        return digest in self._index or digest in self._writing

    async def load(self, digest: bytes, spec: EmbeddingSpec, memory: npt.NDArray[np.uint8]) -> bool:
        """Copies an embedding into ``memory``; False when it is not here or not whole.

        A cancelled caller is held until no thread writes to ``memory`` any more.
        """
        self.counters.queries += 1
        if digest not in self._index:
            return False
        self._index.touch(digest)
        try:
            await _run(self._readers, lambda: self._folder.read(digest, spec, memory))
        except FileNotFoundError:  # evicted while this waited for a thread, or deleted by somebody
            self._index.remove(digest)
            return False
        except (DamagedRecordError, OSError) as error:
            logger.warning("an embedding on disk is of no use and dropped: %s", error)
            self.counters.damaged += 1
            self._index.remove(digest)
            self._remove([digest])
            return False
        self.counters.hits += 1
        return True

    def keep(
        self,
        digest: bytes,
        spec: EmbeddingSpec,
        memory: npt.NDArray[np.uint8],
        done: Callable[[], None],
    ) -> None:
        """Writes an embedding in the background; ``done`` is called once ``memory`` is let go.

        It is dropped, and counted, when too many wait or it does not fit.
        """
        assert not self.holds(digest)
        size = record_bytes(spec)
        full = len(self._writing) >= self._max_writes
        victims = None if full else self._index.reserve(size)
        if victims is None:
            self.counters.dropped += 1
            done()
            return

        def ended(write: "asyncio.Future[None]") -> None:
            del self._writing[digest]
            self._account(write, digest, size)
            done()

        self._writing[digest] = asyncio.get_running_loop().run_in_executor(
            self._writer, self._folder.write, digest, spec, memory, victims
        )
        self._writing[digest].add_done_callback(ended)

    async def close(self) -> None:
        """Lets what is being written end, drops what waits, and gives the folder back."""
        self._readers.shutdown(wait=False, cancel_futures=True)
        self._writer.shutdown(wait=False, cancel_futures=True)
        if self._writing:
            await asyncio.wait(list(self._writing.values()), timeout=_CLOSE_TIMEOUT_S)
            await asyncio.sleep(0)  # their callbacks
        self._folder.give_back()

    def _account(self, write: "asyncio.Future[None]", digest: bytes, size: int) -> None:
        error = None if write.cancelled() else write.exception()
        if error is not None:
            logger.warning("an embedding was not written to disk: %r", error)
        if write.cancelled() or error is not None:
            self.counters.dropped += 1
            self._index.unreserve(size)
        else:
            self.counters.writes += 1
            self._index.add(digest, size)

    def _remove(self, digests: Sequence[bytes]) -> None:
        if digests:
            self._writer.submit(self._folder.remove, digests)


async def _run(executor: ThreadPoolExecutor, work: Callable[[], T]) -> T:
    """Waits for a thread's work to end, whether cancelled meanwhile or not."""
    future = asyncio.get_running_loop().run_in_executor(executor, work)
    cancelled: asyncio.CancelledError | None = None
    while not future.done():
        try:
            await asyncio.shield(future)
        except asyncio.CancelledError as error:
            if not future.done():
                cancelled = error
    if cancelled is not None:
        raise cancelled
    return future.result()
