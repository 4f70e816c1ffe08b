"""The record that seals a transfer: what was pushed, and the first token."""

import struct
import zlib
from dataclasses import dataclass

from epd.errors import DataLossError, TransferFailedError
from epd.handover.layer_digests import DIGEST_BYTES
from epd.transfer.base import Segment
from epd.transfer.buffer import HostBuffer

#: Magic, generation, first token, logprob, WRITEs, bytes, length of the id, id; then a CRC-32.
_BODY = struct.Struct("<4sQIdIQH64s")
_CRC = struct.Struct("<I")
_MAGIC = b"seal"
#: A record without digests.
SEAL_BYTES = 128
assert _BODY.size + _CRC.size <= SEAL_BYTES


@dataclass(frozen=True)
class SealRecord:
    """``write_count`` and ``byte_count`` cover the KV WRITEs, not the seal's own.

    ``layer_digests``: one per layer when the reader has asked for them, else none. They follow the
    record proper; a damaged one is found when it is compared.
    """

    transfer_id: str
    generation: int
    first_token: int
    logprob: float
    write_count: int
    byte_count: int
    layer_digests: tuple[bytes, ...] = ()

    def encode(self) -> bytes:
        """The record in ``SEAL_BYTES`` bytes, then the digests; ids are at most 64 bytes long."""
        name = self.transfer_id.encode()
        assert len(name) <= 64
        body = _BODY.pack(
            _MAGIC,
            self.generation,
            self.first_token,
            self.logprob,
            self.write_count,
            self.byte_count,
            len(name),
            name,
        )
        record = (body + _CRC.pack(zlib.crc32(body))).ljust(SEAL_BYTES, b"\0")
        return record + b"".join(self.layer_digests)

    @classmethod
    def decode(cls, data: bytes, transfer_id: str, generation: int) -> "SealRecord":
        """Reads the record and checks that it is the one expected.

        Raises:
            DataLossError: the bytes are damaged.
            TransferFailedError: the record is another transfer's.
        """
        body = data[: _BODY.size]
        (crc,) = _CRC.unpack_from(data, _BODY.size)
        magic, found_generation, token, logprob, writes, byte_count, length, name = _BODY.unpack(
            body
        )
        if magic != _MAGIC or zlib.crc32(body) != crc:
            raise DataLossError(f"the seal of transfer {transfer_id} is damaged")
        found = name[:length].decode(errors="replace")
        if (found, found_generation) != (transfer_id, generation):
            raise TransferFailedError(
                f"found the seal of {found} generation {found_generation}, "
                f"not of {transfer_id} generation {generation}"
            )
        digests = tuple(
            data[start : start + DIGEST_BYTES]
            for start in range(SEAL_BYTES, len(data), DIGEST_BYTES)
        )
        return cls(found, found_generation, token, logprob, writes, byte_count, digests)


class SealSlots:
    """Fixed-size places for seal records in host memory that the owner registers.

    A slot is taken for as long as its transfer can still touch it, so a late WRITE never lands in
    another transfer's record. Used on the event loop only.

    Args:
        count: Slots.
        digest_count: Layer digests that a slot has room for.
    """

    def __init__(self, count: int, digest_count: int = 0) -> None:
        self._size = SEAL_BYTES + digest_count * DIGEST_BYTES
        self._buffer = HostBuffer(count * self._size)
        self._free = list(range(count))
        self.count = count

    @property
    def segment(self) -> Segment:
        """All slots, for registration."""
        return self._buffer.segment

    @property
    def free_count(self) -> int:
        """Slots that are not taken."""
        return len(self._free)

    def take(self) -> int | None:
        """A zeroed slot, or None when all are taken."""
        if not self._free:
            return None
        slot = self._free.pop()
        self.write(slot, bytes(self._size))
        return slot

    def give_back(self, slot: int) -> None:
        """Ends the use of a taken slot."""
        assert slot not in self._free
        self._free.append(slot)

    def segment_of(self, slot: int) -> Segment:
        """Where a slot lies, all of it."""
        return self._buffer.part(slot * self._size, self._size)

    def write(self, slot: int, record: bytes) -> Segment:
        """Puts an encoded record into a slot; returns where it lies."""
        assert len(record) <= self._size
        self._buffer.view(slot * self._size, len(record)).data[:] = record
        return self._buffer.part(slot * self._size, len(record))

    def read(self, slot: int) -> bytes:
        """A copy of a slot's bytes."""
        return self._buffer.view(slot * self._size, self._size).tobytes()
