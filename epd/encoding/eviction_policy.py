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

    New keys enter the small queue. Used there, a key moves to the main queue when its turn comes;
    else it goes and is remembered as a ghost, and a ghost that comes back enters the main queue
    directly. The main queue is a FIFO that gives a used key another round.

    The small queue begins with a tenth of the capacity and is adapted, as in the paper's S3-FIFO-D,
    by ARC's rule: a key that comes back although the small queue dropped it makes that larger, one
    that the main queue dropped makes it smaller, each by its size and more where its kind of ghost
    is the rarer one. Images that never come again so keep it small; images that all come again
    soon and then never, as a chat's do, make it nearly all there is, which is then close to LRU.

    It departs from the paper in three numbers, chosen by hit rates on synthetic sequences
    (docs/benchmarks.md): one use suffices, in either queue; ghosts of the small queue reach back
    half a capacity, because keys that come back later would hardly have been held; those of the
    main queue reach back one and a half.
    """

    _LEAST_SHARE = 0.02
    _SMALL_GHOSTS = 0.5
    _MAIN_GHOSTS = 1.5

    def __init__(self, capacity_bytes: int, small_share: float = 0.1) -> None:
        self._small_target = capacity_bytes * small_share
        self._least_target = capacity_bytes * self._LEAST_SHARE
        self._most_target = capacity_bytes - self._least_target
        self._small = _Queue()
        self._main = _Queue()
        self._small_ghosts = _Ghosts(capacity_bytes * self._SMALL_GHOSTS)
        self._main_ghosts = _Ghosts(capacity_bytes * self._MAIN_GHOSTS)
        self._used: set[bytes] = set()

    @property
    def small_target_bytes(self) -> float:
        """What the small queue may hold before the main one has to give."""
        return self._small_target

    def insert(self, key: bytes, size: int) -> None:
        if key in self._small_ghosts:
            self._adapt(size * _weight(self._main_ghosts, self._small_ghosts))
            self._small_ghosts.pop(key)
            self._main.push(key, size)
        elif key in self._main_ghosts:
            self._adapt(-size * _weight(self._small_ghosts, self._main_ghosts))
            self._main_ghosts.pop(key)
            self._main.push(key, size)
        else:
            self._small.push(key, size)

    def touch(self, key: bytes) -> None:
        if key in self._small or key in self._main:
            self._used.add(key)

    def remove(self, key: bytes) -> None:
        for queue in (self._small, self._main):
            if key in queue:
                queue.pop(key)
        self._used.discard(key)

    def evict(self, evictable: Callable[[bytes], bool]) -> bytes | None:
        # The small queue may promote all it holds instead, so the main one is always asked last.
        if self._small.bytes > self._small_target or not len(self._main):
            return self._evict_small(evictable) or self._evict_main(evictable)
        return (
            self._evict_main(evictable)
            or self._evict_small(evictable)
            or self._evict_main(evictable)
        )

    def _evict_small(self, evictable: Callable[[bytes], bool]) -> bytes | None:
        for _ in range(len(self._small)):
            key, size = self._small.pop_oldest()
            if not evictable(key):
                self._small.push(key, size)
            elif key in self._used:
                self._used.discard(key)
                self._main.push(key, size)
            else:
                self._small_ghosts.remember(key, size)
                return key
        return None

    def _evict_main(self, evictable: Callable[[bytes], bool]) -> bytes | None:
        for _ in range(2 * len(self._main)):  # a used key comes round a second time
            key, size = self._main.pop_oldest()
            if evictable(key):
                if key not in self._used:
                    self._main_ghosts.remember(key, size)
                    return key
                self._used.discard(key)
            self._main.push(key, size)
        return None

    def _adapt(self, change: float) -> None:
        target = self._small_target + change
        self._small_target = min(max(target, self._least_target), self._most_target)


class _Queue:
    """Keys in order of arrival, and the bytes of all of them."""

    def __init__(self) -> None:
        self.bytes = 0
        self._sizes: OrderedDict[bytes, int] = OrderedDict()

    def __len__(self) -> int:
        return len(self._sizes)

    def __contains__(self, key: bytes) -> bool:
        return key in self._sizes

    def push(self, key: bytes, size: int) -> None:
        self._sizes[key] = size
        self.bytes += size

    def pop(self, key: bytes) -> None:
        self.bytes -= self._sizes.pop(key)

    def pop_oldest(self) -> tuple[bytes, int]:
        key, size = self._sizes.popitem(last=False)
        self.bytes -= size
        return key, size


class _Ghosts(_Queue):
    """Keys that have gone; the oldest are forgotten where together they were over the limit."""

    def __init__(self, limit_bytes: float) -> None:
        super().__init__()
        self._limit_bytes = limit_bytes

    def remember(self, key: bytes, size: int) -> None:
        self.push(key, size)
        while self.bytes > self._limit_bytes:
            self.pop_oldest()


def _weight(others: _Queue, own: _Queue) -> float:
    """How much a ghost that comes back counts: the rarer its kind, the more."""
    return max(1.0, others.bytes / max(1, own.bytes))


def make_policy(name: PolicyName, capacity_bytes: int) -> EvictionPolicy:
    """The policy of that name for a cache of that many bytes."""
    return LruPolicy() if name == "lru" else S3FifoPolicy(capacity_bytes)
