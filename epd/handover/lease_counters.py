"""What has become of a decode worker's leases."""

from collections import Counter
from dataclasses import dataclass, field


@dataclass
class LeaseCounters:
    """Totals since the start."""

    granted: int = 0
    sealed: int = 0
    expired: int = 0
    failed: int = 0
    cancelled: int = 0
    refused_late: int = 0
    unknown_renewals: int = 0
    peers_lost: int = 0
    failed_by_reason: Counter[str] = field(default_factory=Counter)
