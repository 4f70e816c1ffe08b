"""Bounds of the sending side."""

import enum
from dataclasses import dataclass


class PushTime(enum.Enum):
    """When KV leaves the prefill worker."""

    #: Each layer of each chunk as soon as it is final, while the next ones are computed.
    LAYERWISE = "layerwise"
    #: Everything after the forward pass. Only to measure against.
    AFTER = "after"


@dataclass(frozen=True)
class SenderConfig:
    """Durations in seconds.

    ``drain_timeout_s``: how long the caller of a failed push waits for its running WRITEs. Beyond
    that the memory of both sides is held without it, until they have ended. ``lost_write_s``: how
    long a WRITE that ran when its decode process was lost may still land there. ``merge_bytes``:
    layers that have to wait for the transfer agent leave together in WRITEs of at most so much, the
    last ones with the seal; 0: each alone.
    """

    renew_interval_s: float = 0.5
    reserve_timeout_s: float = 15.0
    control_timeout_s: float = 5.0
    drain_timeout_s: float = 30.0
    lost_write_s: float = 30.0
    max_unsettled: int = 65536
    merge_bytes: int = 16 << 20
    push_time: PushTime = PushTime.LAYERWISE
