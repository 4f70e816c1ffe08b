"""Bounds of the sending side."""

from dataclasses import dataclass


@dataclass(frozen=True)
class SenderConfig:
    """Durations in seconds.

    ``drain_timeout_s``: how long a failed push waits for its running WRITEs before it lets go of
    this side's memory. Decode keeps its own in quarantine beyond that.
    """

    renew_interval_s: float = 0.5
    reserve_timeout_s: float = 15.0
    control_timeout_s: float = 5.0
    drain_timeout_s: float = 30.0
    max_unsettled: int = 65536
