"""Where a missing embedding comes from: the disk tier if it has it, else the vision tower."""

import time

from epd.encoding.disk_tier import DiskTier
from epd.encoding.embedding_cache import CacheEntry
from epd.encoding.embedding_maker import EmbeddingMaker
from epd.encoding.embedding_store import EmbeddingStore
from epd.encoding.encode_events import Stage
from epd.media import Media
from epd.telemetry import semconv


class EmbeddingSource:
    """Fills memory of cache entries. Lives on one event loop.

    Args:
        maker: Preprocessing and vision tower.
        disk: Embeddings of earlier times; None without.
        store: Where entries lie.
    """

    def __init__(self, maker: EmbeddingMaker, disk: DiskTier | None, store: EmbeddingStore) -> None:
        self._maker = maker
        self._disk = disk
        self._store = store

    async def fill(self, entry: CacheEntry, data: Media) -> tuple[Stage, ...]:
        """The embedding of an image file into the entry's memory; the stages it went through.

        However it ends, nobody writes to the memory any more. Raises as :meth:`EmbeddingMaker.make`
        does; a disk that fails is no failure.
        """
        memory = self._store.view(entry)
        if self._disk is None:
            return await self._maker.make(data, entry.spec, memory)
        started_ns = time.monotonic_ns()
        if await self._disk.load(entry.digest, entry.spec, memory):
            return (Stage(semconv.STAGE_DISK_READ, started_ns, time.monotonic_ns()),)
        return await self._maker.make(data, entry.spec, memory)

    def keep(self, entry: CacheEntry) -> None:
        """The entry is READY: writes it to disk in the background, pinned until that is done."""
        if self._disk is not None and not self._disk.holds(entry.digest):
            self._store.cache.pin(entry)
            self._disk.keep(
                entry.digest,
                entry.spec,
                self._store.view(entry),
                lambda: self._store.cache.unpin(entry),
            )
