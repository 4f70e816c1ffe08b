"""What a caller wants moved."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from epd.transfer.base import Segment


@dataclass(frozen=True)
class TransferContent:
    """Segments that pair up one to one, and the notice that follows the data."""

    local: Sequence[Segment]
    remote: Sequence[Segment]
    notice: bytes = b""


@dataclass(frozen=True)
class TransferOrder:
    """``operation`` is WRITE or READ.

    ``content`` is called on the agent thread, once, when the order's turn has come: until then its
    owner may still add to it. ``guard`` is called there before each post and raises an EpdError to
    forbid it.
    """

    operation: str
    peer: str
    content: Callable[[], TransferContent]
    guard: Callable[[], None] | None = None
