"""Bounds of the receiving side."""

from dataclasses import dataclass, field

from epd.handover.lease_config import LeaseConfig


@dataclass(frozen=True)
class ReceiverConfig:
    """Durations in seconds."""

    leases: LeaseConfig = field(default_factory=LeaseConfig)
    max_waiting: int = 256
    reserve_timeout_s: float = 10.0
    tick_s: float = 0.005
    expire_every_s: float = 0.05
