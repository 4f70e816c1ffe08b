"""What the two ends of a collective pair say to each other beside the data."""

import enum
import struct
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from epd.errors import TransferFailedError
from epd.transfer.base import Segment
from epd.transfer.segments import SegmentArray

_GROUP = struct.Struct("<HB")
_NUMBER = struct.Struct("<Q")
#: Number of the transfer, count of segments.
_MOVE = struct.Struct("<QI")
#: Address, length and device of a segment, as the rows of a SegmentArray.
_SEGMENT_BYTES = 24


class Kind(enum.IntEnum):
    """Kinds of frames. GROUP, OFFER, ASK and FETCHED come from the end that began the transfer."""

    #: Join the group whose store listens here.
    GROUP = 1
    #: May I send for these segments of yours (WRITE)?
    OFFER = 2
    #: Send me these segments of yours (READ).
    ASK = 3
    #: The data's other half is posted: post yours. The order of these is the order of posts.
    ACCEPT = 4
    #: A WRITE has landed.
    LANDED = 5
    #: A READ has landed.
    FETCHED = 6
    #: The transfer will not happen, and why.
    REFUSED = 7


@dataclass(frozen=True)
class GroupInvitation:
    """Where the store of a new group listens; ``on_device``: it moves device memory."""

    host: str
    port: int
    on_device: bool

    def encode(self) -> bytes:
        """The frame's body."""
        return _GROUP.pack(self.port, self.on_device) + self.host.encode()

    @classmethod
    def decode(cls, body: bytes) -> "GroupInvitation":
        """Reads a body; raises TransferFailedError."""
        try:
            port, on_device = _GROUP.unpack_from(body)
            return cls(body[_GROUP.size :].decode(), port, bool(on_device))
        except (struct.error, UnicodeDecodeError) as error:
            raise TransferFailedError(f"not an invitation: {error}") from error


@dataclass(frozen=True)
class Move:
    """Body of OFFER and ASK: segments in the receiver of the frame."""

    number: int
    segments: Sequence[Segment]
    notice: bytes

    def encode(self) -> bytes:
        """The frame's body."""
        rows = SegmentArray.of(self.segments).rows
        return _MOVE.pack(self.number, len(rows)) + rows.astype("<i8").tobytes() + self.notice

    @classmethod
    def decode(cls, body: bytes) -> "Move":
        """Reads a body; raises TransferFailedError."""
        try:
            number, count = _MOVE.unpack_from(body)
            end = _MOVE.size + count * _SEGMENT_BYTES
            if end > len(body):
                raise struct.error(f"{count} segments in {len(body)} bytes")
            rows = np.frombuffer(body, "<i8", count * 3, _MOVE.size).reshape(-1, 3)
            return cls(number, SegmentArray(rows), body[end:])
        except struct.error as error:
            raise TransferFailedError(f"not a transfer: {error}") from error


def number_body(number: int, text: str = "") -> bytes:
    """Body of the other kinds: the transfer's number, for REFUSED with the reason."""
    return _NUMBER.pack(number) + text.encode()


def read_number(body: bytes) -> tuple[int, str]:
    """Number and text of such a body; raises TransferFailedError."""
    try:
        return int(_NUMBER.unpack_from(body)[0]), body[_NUMBER.size :].decode(errors="replace")
    except struct.error as error:
        raise TransferFailedError(f"not a transfer's number: {error}") from error
