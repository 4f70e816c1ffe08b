"""The memory that a backend may touch."""

from collections.abc import Sequence

import numpy as np

from epd.errors import TransferFailedError
from epd.transfer.base import Segment
from epd.transfer.segments import SegmentArray


class RegisteredMemory:
    """Segments with their kind, DRAM or VRAM. For libraries that do not check by themselves."""

    def __init__(self) -> None:
        self._wholes: list[tuple[Segment, str]] = []

    @property
    def main_kind(self) -> str:
        """VRAM as soon as there is any."""
        return "VRAM" if any(kind == "VRAM" for _, kind in self._wholes) else "DRAM"

    def add(self, segment: Segment, memory_kind: str) -> None:
        """From now on the segment may be touched."""
        self._wholes.append((segment, memory_kind))

    def kind_of(self, segment: Segment) -> str:
        """The kind of memory a segment lies in.

        Raises:
            TransferFailedError: not all of it is registered.
        """
        for whole, kind in self._wholes:
            if contains(whole, segment):
                return kind
        raise TransferFailedError(
            f"{segment.length} bytes at {segment.address:#x} are not registered"
        )

    def check(self, segments: Sequence[Segment]) -> None:
        """Checks that all of several segments are registered.

        Raises:
            TransferFailedError: one is not.
        """
        rows = SegmentArray.of(segments).rows
        begins, ends, devices = rows[:, 0], rows[:, 0] + rows[:, 1], rows[:, 2]
        registered = np.zeros(len(rows), dtype=bool)
        for whole, _ in self._wholes:
            inside = (begins >= whole.address) & (ends <= whole.address + whole.length)
            registered |= inside & (begins < ends) & (devices == whole.device_id)
        for index in np.flatnonzero(~registered):
            self.kind_of(segments[int(index)])


def contains(whole: Segment, part: Segment) -> bool:
    """Whether ``part`` lies inside ``whole``."""
    return (
        whole.device_id == part.device_id
        and part.length > 0
        and whole.address <= part.address
        and part.address + part.length <= whole.address + whole.length
    )
