"""Numbers of an encoder for load reports and metrics."""

from dataclasses import dataclass
from typing import Self

from epd.encoding.disk_tier import DiskCounters, DiskTier
from epd.encoding.embedding_maker import EmbeddingMaker
from epd.encoding.embedding_store import EmbeddingStore
from epd.encoding.image_grants import ImageGrants
from epd.encoding.productions import Productions


@dataclass(frozen=True)
class EncoderStats:
    """A snapshot. Totals run from the start of the process.

    ``free_bytes`` counts evictable memory as free; ``used_bytes`` is all that lies in the arena,
    kept for later or in use, quarantine left out.
    """

    running_images: int
    waiting_images: int
    waiting_patches: int
    total_bytes: int
    free_bytes: int
    used_bytes: int
    cached_bytes: int
    in_use_bytes: int
    quarantined_bytes: int
    open_leases: int
    cache_queries: int
    cache_hits: int
    evictions: int
    forwards: int
    encoded_images: int
    encoded_patches: int
    expired_leases: int
    unknown_renewals: int
    preprocess_restarts: int
    disk_bytes: int
    disk: DiskCounters

    @classmethod
    def of(
        cls,
        store: EmbeddingStore,
        grants: ImageGrants,
        productions: Productions,
        maker: EmbeddingMaker,
        disk: DiskTier | None,
    ) -> Self:
        """Reads the parts of an encoder; from any thread."""
        cache, batcher = store.cache, maker.batcher
        running = batcher.running_images
        return cls(
            running_images=running,
            waiting_images=max(0, len(productions) - running),
            waiting_patches=productions.patches,
            total_bytes=cache.total_bytes,
            free_bytes=cache.free_bytes + cache.idle_bytes,
            used_bytes=cache.in_use_bytes + cache.idle_bytes,
            cached_bytes=cache.idle_bytes,
            in_use_bytes=cache.in_use_bytes,
            quarantined_bytes=cache.quarantined_bytes,
            open_leases=store.leases.open_count,
            cache_queries=grants.queries,
            cache_hits=grants.hits,
            evictions=cache.evictions,
            forwards=batcher.forwards,
            encoded_images=batcher.encoded_images,
            encoded_patches=batcher.encoded_patches,
            expired_leases=store.leases.expired,
            unknown_renewals=store.leases.unknown_renewals,
            preprocess_restarts=maker.pool.restarts,
            disk_bytes=disk.used_bytes if disk is not None else 0,
            disk=disk.counters if disk is not None else DiskCounters(),
        )
