"""Host memory that peers may read and write."""

import numpy as np
import numpy.typing as npt

from epd.host_memory import host_memory
from epd.transfer.base import Segment


class HostBuffer:
    """:func:`host_memory` in segments. It lives as long as this object or any view of it; whoever
    registers it keeps the object until the backend is closed.
    """

    def __init__(self, byte_count: int) -> None:
        """``byte_count``: usable bytes, 1 or more."""
        self._bytes = host_memory(byte_count)
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
