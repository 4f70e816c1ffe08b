"""Host memory that peers may read and write."""

import mmap

import numpy as np
import numpy.typing as npt

from epd.transfer.base import Segment


class HostBuffer:
    """Page-aligned host memory whose pages exist from the start.

    Touching every page up front keeps the first transfer from paying for page faults, which cost
    many times the copy itself. The memory lives as long as this object or any view of it; whoever
    registers it keeps the object until the backend is closed.
    """

    def __init__(self, byte_count: int) -> None:
        """``byte_count``: usable bytes, 1 or more."""
        if byte_count < 1:
            raise ValueError(f"a buffer needs at least one byte, not {byte_count}")
        pages = -(-byte_count // mmap.PAGESIZE)
        memory = np.frombuffer(mmap.mmap(-1, pages * mmap.PAGESIZE), dtype=np.uint8)
        memory[:: mmap.PAGESIZE] = 0
        self._bytes: npt.NDArray[np.uint8] = memory[:byte_count]
        #: Virtual address of the first byte.
        self.address = int(self._bytes.ctypes.data)

    @property
    def segment(self) -> Segment:
        """The whole buffer, for registration."""
        return Segment(self.address, len(self._bytes))

    def part(self, offset: int, length: int) -> Segment:
        """The segment of bytes [offset, offset + length), which must lie inside."""
        assert offset >= 0
        assert 0 < length <= len(self._bytes) - offset
        return Segment(self.address + offset, length)

    def view(self, offset: int = 0, length: int | None = None) -> npt.NDArray[np.uint8]:
        """Writable bytes [offset, offset + length), without a copy; to the end by default."""
        return self._bytes[offset:][:length]
