"""Byte ranges of one piece of registered memory, handed out all or nothing."""

import bisect
import threading
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, order=True)
class ByteRange:
    """Bytes [offset, offset + length) of the arena; ``length`` is what was asked for."""

    offset: int
    length: int


class Arena:
    """First-fit allocator over ``capacity_bytes``; every method may be called from any thread.

    A range is free, used or quarantined. Quarantined means: no request owns it any more, but a peer
    may still read or write it, so it is not handed out before :meth:`settle`. It knows offsets
    only; the owner of the memory adds the base address. Sizes are rounded up to ``alignment``
    (a power of two), so all offsets are aligned as the base is.
    """

    def __init__(self, capacity_bytes: int, alignment: int = 256) -> None:
        if capacity_bytes < 0 or alignment < 1 or alignment & (alignment - 1):
            raise ValueError(f"no arena of {capacity_bytes} bytes with alignment {alignment}")
        self.alignment = alignment
        self.capacity_bytes = capacity_bytes & ~(alignment - 1)
        self._lock = threading.Lock()
        # Sorted by offset, never adjacent, never overlapping: (offset, length).
        self._holes = [(0, self.capacity_bytes)] if self.capacity_bytes else []
        self._used: set[ByteRange] = set()
        self._quarantined: set[ByteRange] = set()
        self._used_bytes = 0
        self._quarantined_bytes = 0

    @property
    def used_bytes(self) -> int:
        """Bytes that belong to somebody, rounded up to the alignment."""
        return self._used_bytes

    @property
    def quarantined_bytes(self) -> int:
        """Bytes that belong to nobody and may not be handed out yet."""
        return self._quarantined_bytes

    @property
    def free_bytes(self) -> int:
        """Bytes in all holes; one allocation may still not fit."""
        with self._lock:
            return self.capacity_bytes - self._used_bytes - self._quarantined_bytes

    def allocate(self, length: int) -> ByteRange | None:
        """A range of at least one byte, or None when no hole is large enough."""
        granted = self.allocate_all((length,))
        return granted[0] if granted else None

    def allocate_all(self, lengths: Sequence[int]) -> list[ByteRange] | None:
        """One range per length, or None and nothing taken when they do not all fit."""
        if any(length < 1 for length in lengths):
            raise ValueError(f"lengths must be 1 or more: {list(lengths)}")
        with self._lock:
            granted: list[ByteRange] = []
            for length in lengths:
                one = self._take(length)
                if one is None:
                    for other in granted:
                        self._give_back(other)
                    return None
                granted.append(one)
            self._used.update(granted)
            self._used_bytes += sum(map(self._rounded, granted))
            return granted

    def free(self, byte_range: ByteRange) -> None:
        """Used → free. A range that is not in use is the caller's bug: KeyError."""
        with self._lock:
            self._used.remove(byte_range)
            self._used_bytes -= self._rounded(byte_range)
            self._give_back(byte_range)

    def quarantine(self, byte_range: ByteRange) -> None:
        """Used → quarantined. A range that is not in use is the caller's bug: KeyError."""
        with self._lock:
            self._used.remove(byte_range)
            self._used_bytes -= self._rounded(byte_range)
            self._quarantined.add(byte_range)
            self._quarantined_bytes += self._rounded(byte_range)

    def settle(self, byte_range: ByteRange) -> None:
        """Quarantined → free. A range that is not in quarantine is the caller's bug: KeyError."""
        with self._lock:
            self._quarantined.remove(byte_range)
            self._quarantined_bytes -= self._rounded(byte_range)
            self._give_back(byte_range)

    def check_integrity(self) -> None:
        """Asserts that holes, used and quarantined ranges tile the arena exactly."""
        with self._lock:
            taken = [(r.offset, self._rounded(r)) for r in self._used | self._quarantined]
            end, previous_hole_end = 0, -1
            for offset, length in sorted(taken + self._holes):
                assert offset == end, f"bytes {end} to {offset} are lost or counted twice"
                end = offset + length
                if (offset, length) in self._holes:
                    assert offset != previous_hole_end, f"holes touch at {offset}"
                    previous_hole_end = end
            assert end == self.capacity_bytes, f"{end} of {self.capacity_bytes} bytes accounted for"
            assert self._used_bytes == sum(map(self._rounded, self._used))
            assert self._quarantined_bytes == sum(map(self._rounded, self._quarantined))

    def _rounded(self, byte_range: ByteRange) -> int:
        return (byte_range.length + self.alignment - 1) & ~(self.alignment - 1)

    def _take(self, length: int) -> ByteRange | None:
        for index, (offset, hole_length) in enumerate(self._holes):
            taken = ByteRange(offset, length)
            size = self._rounded(taken)
            if size > hole_length:
                continue
            if size == hole_length:
                del self._holes[index]
            else:
                self._holes[index] = (offset + size, hole_length - size)
            return taken
        return None

    def _give_back(self, byte_range: ByteRange) -> None:
        offset, length = byte_range.offset, self._rounded(byte_range)
        index = bisect.bisect_left(self._holes, (offset, 0))
        if index < len(self._holes) and self._holes[index][0] == offset + length:
            length += self._holes.pop(index)[1]
        if index and sum(self._holes[index - 1]) == offset:
            index -= 1
            offset, before = self._holes.pop(index)
            length += before
        self._holes.insert(index, (offset, length))
