"""Which embeddings lie on disk and how much room they take. Plain bookkeeping."""

from collections import OrderedDict
from collections.abc import Iterable


class DiskIndex:
    """Sizes by digest, least recently used first; never more than the capacity.

    Room for a record is reserved before it is written and counts from then on.
    """

    def __init__(self, capacity_bytes: int) -> None:
        self._capacity_bytes = capacity_bytes
        self._sizes: OrderedDict[bytes, int] = OrderedDict()
        self.used_bytes = 0

    def __len__(self) -> int:
        return len(self._sizes)

    def __contains__(self, digest: bytes) -> bool:
        return digest in self._sizes

    def fill(self, found: Iterable[tuple[bytes, int]]) -> list[bytes]:
        """Takes in what lies on disk, least recently used first; returns what has to go."""
        for digest, size in found:
            self.add(digest, size, reserved=False)
        return self._evict(0)

    def touch(self, digest: bytes) -> None:
        """Notes a use."""
        self._sizes.move_to_end(digest)

    def reserve(self, size: int) -> list[bytes] | None:
        """Room for a record, and what has to go for it first; None when it never fits."""
        if size > self._capacity_bytes:
            return None
        victims = self._evict(size)
        if self.used_bytes + size > self._capacity_bytes:  # the rest is reserved by others
            return None
        self.used_bytes += size
        return victims

    def unreserve(self, size: int) -> None:
        """The record was not written."""
        self.used_bytes -= size

    def add(self, digest: bytes, size: int, *, reserved: bool = True) -> None:
        """The record is on disk."""
        assert digest not in self._sizes
        self._sizes[digest] = size
        if not reserved:
            self.used_bytes += size

    def remove(self, digest: bytes) -> None:
        """The record is gone. Fine if it was not there."""
        self.used_bytes -= self._sizes.pop(digest, 0)

    def _evict(self, coming: int) -> list[bytes]:
        victims = []
        while self._sizes and self.used_bytes + coming > self._capacity_bytes:
            digest, size = self._sizes.popitem(last=False)
            self.used_bytes -= size
            victims.append(digest)
        return victims
