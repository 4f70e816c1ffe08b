"""Which cached item goes when room is needed. Pure accounting: keys and sizes, no memory."""

from collections import OrderedDict
from collections.abc import Callable
from typing import Literal, Protocol

PolicyName = Literal["s3fifo", "lru"]


class EvictionPolicy(Protocol):
    """An order of eviction over the keys that were inserted and neither removed nor evicted."""

    def insert(self, key: bytes, size: int) -> None:
        """Takes in a key that is not in."""

    def touch(self, key: bytes) -> None:
        """Notes a use. An unknown key is fine."""

    def remove(self, key: bytes) -> None:
        """Forgets a key that goes for another reason. An unknown key is fine."""

    def evict(self, evictable: Callable[[bytes], bool]) -> bytes | None:
        """Takes out the next key that may go; None when none may."""


class LruPolicy:
    """Least recently used first."""

    def __init__(self) -> None:
        self._keys: OrderedDict[bytes, None] = OrderedDict()

    def insert(self, key: bytes, size: int) -> None:
        self._keys[key] = None

    def touch(self, key: bytes) -> None:
        if key in self._keys:
            self._keys.move_to_end(key)

    def remove(self, key: bytes) -> None:
        self._keys.pop(key, None)

    def evict(self, evictable: Callable[[bytes], bool]) -> bytes | None:
        for key in self._keys:
            if evictable(key):
                del self._keys[key]
                return key
        return None


class S3FifoPolicy:
    """S3-FIFO (Yang et al., SOSP 2023): one-hit wonders pass through a small queue and leave.

    New keys enter the small queue, a tenth of the capacity. Used twice there, a key moves to the
    main queue; else it goes and is remembered as a ghost, and a ghost that comes back enters the
    main queue directly. The main queue is a FIFO that gives a used key another round.
    """

    _PROMOTION_USES = 2
    _MAX_USES = 3

    def __init__(self, capacity_bytes: int, small_share: float = 0.1) -> None:
        self._small_target = int(capacity_bytes * small_share)
        self._ghost_limit = capacity_bytes - self._small_target
        self._small: OrderedDict[bytes, int] = OrderedDict()
        self._main: OrderedDict[bytes, int] = OrderedDict()
        self._ghosts: OrderedDict[bytes, int] = OrderedDict()
        self._small_bytes = 0
        self._ghost_bytes = 0
        self._uses: dict[bytes, int] = {}

    def insert(self, key: bytes, size: int) -> None:
        if key in self._ghosts:
            self._ghost_bytes -= self._ghosts.pop(key)
            self._main[key] = size
        else:
            self._small[key] = size
            self._small_bytes += size
        self._uses[key] = 0

    def touch(self, key: bytes) -> None:
        if key in self._uses:
            self._uses[key] = min(self._uses[key] + 1, self._MAX_USES)

    def remove(self, key: bytes) -> None:
        if self._uses.pop(key, None) is None:
            return
        if key in self._small:
            self._small_bytes -= self._small.pop(key)
        else:
            del self._main[key]

    def evict(self, evictable: Callable[[bytes], bool]) -> bytes | None:
        # The small queue may promote all it holds instead, so the main one is always asked last.
        if self._small_bytes > self._small_target or not self._main:
            key = self._evict_small(evictable) or self._evict_main(evictable)
        else:
            key = (
                self._evict_main(evictable)
                or self._evict_small(evictable)
                or self._evict_main(evictable)
            )
        if key is not None:
            del self._uses[key]
        return key

    def _evict_small(self, evictable: Callable[[bytes], bool]) -> bytes | None:
        for _ in range(len(self._small)):
            key, size = self._small.popitem(last=False)
            if not evictable(key):
                self._small[key] = size
                continue
            self._small_bytes -= size
            if self._uses[key] < self._PROMOTION_USES:
                self._remember(key, size)
                return key
            self._main[key] = size
            self._uses[key] = 0
        return None

    def _evict_main(self, evictable: Callable[[bytes], bool]) -> bytes | None:
        for _ in range(len(self._main) * (self._MAX_USES + 1)):
            key, size = self._main.popitem(last=False)
            if evictable(key):
                if not self._uses[key]:
                    return key
                self._uses[key] -= 1
            self._main[key] = size
        return None

    def _remember(self, key: bytes, size: int) -> None:
        self._ghosts[key] = size
        self._ghost_bytes += size
        while self._ghost_bytes > self._ghost_limit:
            self._ghost_bytes -= self._ghosts.popitem(last=False)[1]


def make_policy(name: PolicyName, capacity_bytes: int) -> EvictionPolicy:
    """The policy of that name for a cache of that many bytes."""
    return LruPolicy() if name == "lru" else S3FifoPolicy(capacity_bytes)
