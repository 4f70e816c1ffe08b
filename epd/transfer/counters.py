"""What a transfer agent has done since its start."""

from dataclasses import dataclass, field

from epd.errors import EpdError
from epd.transfer.base import TransferResult


@dataclass
class OperationCounters:
    """Totals of one operation (WRITE or READ); bytes and descriptors of done transfers only."""

    done: int = 0
    failed: int = 0
    byte_count: int = 0
    descriptor_count: int = 0
    transfer_ns: int = 0


@dataclass
class TransferCounters:
    """Written by the agent thread alone. Readers see each number whole, not all at one instant."""

    transport: str = ""
    writes: OperationCounters = field(default_factory=OperationCounters)
    reads: OperationCounters = field(default_factory=OperationCounters)
    notices: int = 0
    #: Exceptions of subscribers, which are logged and survived.
    callback_errors: int = 0

    def record(self, operation: str, outcome: TransferResult | EpdError | None) -> None:
        """Counts a transfer that has ended; None: cancelled before it began."""
        counters = self.writes if operation == "WRITE" else self.reads
        if isinstance(outcome, EpdError):
            counters.failed += 1
        elif outcome is not None:
            counters.done += 1
            counters.byte_count += outcome.byte_count
            counters.descriptor_count += outcome.descriptor_count
            counters.transfer_ns += outcome.transfer_ns
