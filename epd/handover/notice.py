"""The message that rides on a WRITE and reaches decode after its data."""

import enum
import struct
from dataclasses import dataclass

#: Magic, kind, generation, first layer, layers, ordinal, length of the id; then the id in UTF-8 and
#: no more.
_HEAD = struct.Struct("<4sBQIIIH")
_MAGIC = b"epd1"


class NoticeKind(enum.Enum):
    """What the WRITE carried."""

    KV = 1
    SEAL = 2
    #: The last layers and the seal.
    SEALED_KV = 3


@dataclass(frozen=True)
class Notice:
    """``ordinal`` counts a transfer's WRITEs from 0; a KV WRITE has ``layer_count`` layers from
    ``layer`` on.
    """

    kind: NoticeKind
    transfer_id: str
    generation: int
    ordinal: int
    layer: int = 0
    layer_count: int = 0

    def encode(self) -> bytes:
        """The message."""
        name = self.transfer_id.encode()
        head = _HEAD.pack(
            _MAGIC,
            self.kind.value,
            self.generation,
            self.layer,
            self.layer_count,
            self.ordinal,
            len(name),
        )
        return head + name

    @classmethod
    def decode(cls, message: bytes) -> "Notice":
        """Reads a whole message, never a prefix of one.

        Raises:
            ValueError: it is not one of ours.
        """
        if len(message) < _HEAD.size:
            raise ValueError(f"notice of {len(message)} bytes is too short")
        magic, kind, generation, layer, layer_count, ordinal, length = _HEAD.unpack_from(message)
        name = message[_HEAD.size :]
        if magic != _MAGIC or len(name) != length:
            raise ValueError(f"not a notice: {message[:64]!r}")
        return cls(NoticeKind(kind), name.decode(), generation, ordinal, layer, layer_count)
