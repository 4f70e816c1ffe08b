"""Numbers of an encoder for load reports and metrics."""

from dataclasses import dataclass


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
