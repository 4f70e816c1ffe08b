"""What a transfer agent has done since its start."""

from dataclasses import dataclass, field


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
    #: Exceptions of subscribers and completion callbacks, which are logged and survived.
    callback_errors: int = 0
