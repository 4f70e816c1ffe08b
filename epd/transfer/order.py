"""What a caller wants moved."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from epd.transfer.base import Segment


@dataclass(frozen=True)
class TransferOrder:
    """What to move: ``operation`` is WRITE or READ, segments pair up one to one.

    ``guard`` is called on the agent thread before each post and raises an EpdError to forbid it.
    """

    operation: str
    peer: str
    local: Sequence[Segment]
    remote: Sequence[Segment]
    notice: bytes = b""
    guard: Callable[[], None] | None = None
