"""Bounds of the receiving side."""

from dataclasses import dataclass, field

from epd.handover.lease_config import LeaseConfig


@dataclass(frozen=True)
class ReceiverConfig:
    """Durations in seconds.

    ``early_start``: prefill is asked to tell the first token ahead of the seal and to send each
    layer by itself, so that decode may begin while KV still arrives.
    """

    leases: LeaseConfig = field(default_factory=LeaseConfig)
    max_waiting: int = 256
    reserve_timeout_s: float = 10.0
    tick_s: float = 0.005
    expire_every_s: float = 0.05
    early_start: bool = False
