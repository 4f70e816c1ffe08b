"""Bounds of the lease table."""

from dataclasses import dataclass


@dataclass(frozen=True)
class LeaseConfig:
    """Durations in seconds.

    ``progress_timeout_s``: a lease without a WRITE or a Renew ends; also the longest time a sealed
    one waits to be taken. ``settle_grace_s``: how long notices may lag behind their writer's word
    that it is through. ``hold_s``: how long memory of a writer that is gone stays out of use.
    ``peer_share``: most of the pool's blocks that one writer may have reserved or in quarantine.
    """

    progress_timeout_s: float = 5.0
    settle_grace_s: float = 1.0
    hold_s: float = 30.0
    peer_share: float = 0.5
    tombstone_s: float = 120.0
    max_tombstones: int = 65536
