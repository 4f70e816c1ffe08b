"""Accounts of the KV blocks. Plain Python, no torch.

A block is in exactly one state:

* free: nobody's, content void;
* used: held by one or more requests or reservations (a shared prefix is held by several);
* cached: held by nobody, its content is known by hash and may be taken up or evicted;
* quarantined: held by nobody, but a peer may still write to it.
"""

import heapq
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence

from epd.engine.kv_events import KvEventLog


class BlockPool:
    """Hands out block ids and remembers which of them hold a known prefix.

    Thread-safe with a lock of its own, so that a reservation never waits for an engine step. The
    lowest ids go first and in rising order: neighbouring blocks travel as one descriptor.
    """

    def __init__(self, num_blocks: int, block_size: int, enable_prefix_cache: bool = True) -> None:
        assert num_blocks > 0
        assert block_size > 0
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.enable_prefix_cache = enable_prefix_cache
        self.events = KvEventLog()
        self._lock = threading.Lock()
        self._freed_callbacks: list[Callable[[], None]] = []
        self._free = list(range(num_blocks))  # a heap; a sorted list is one
        self._references: dict[int, int] = {}
        self._cached: OrderedDict[int, None] = OrderedDict()  # least recently used first
        self._quarantined: set[int] = set()
        self._hash_of: dict[int, bytes] = {}
        self._block_of: dict[bytes, int] = {}

    @property
    def num_free(self) -> int:
        """Blocks that can be handed out, cached ones included."""
        with self._lock:
            return self._num_free()

    @property
    def num_used(self) -> int:
        """Blocks held by a request or a reservation; a shared block counts once."""
        with self._lock:
            return len(self._references)

    @property
    def num_quarantined(self) -> int:
        """Blocks that a peer may still write to."""
        with self._lock:
            return len(self._quarantined)

    def on_freed(self, callback: Callable[[], None]) -> None:
        """Has ``callback`` called after blocks came free, on the thread that freed them.

        To be called before the pool is in use. The callback must be quick and may use the pool.
        """
        self._freed_callbacks.append(callback)

    def allocate(self, count: int, keep_free: int = 0) -> list[int] | None:
        """Takes ``count`` blocks, all or none; None when fewer than ``keep_free`` would remain."""
        with self._lock:
            if self._num_free() - count < keep_free:
                return None
            blocks = [heapq.heappop(self._free) for _ in range(min(count, len(self._free)))]
            evicted = [self._cached.popitem(last=False)[0] for _ in range(count - len(blocks))]
            self._forget(evicted)
            blocks = sorted(blocks + evicted)
            self._references.update(dict.fromkeys(blocks, 1))
            return blocks

    def free(self, blocks: Sequence[int]) -> None:
        """Gives up one hold on each block; hashed ones stay cached, the last evicted first."""
        with self._lock:
            for block in reversed(blocks):
                if self._drop_reference(block):
                    if block in self._hash_of:
                        self._cached[block] = None
                    else:
                        heapq.heappush(self._free, block)
        self._tell_freed()

    def quarantine(self, blocks: Sequence[int]) -> None:
        """Gives up the only hold on each block while a peer may still write to it."""
        with self._lock:
            self._forget(block for block in blocks if block in self._hash_of)
            for block in blocks:
                last = self._drop_reference(block)
                assert last, f"block {block} is shared: no peer may write to it"
                self._quarantined.add(block)

    def settle(self, blocks: Sequence[int]) -> None:
        """Ends the quarantine: nobody writes to these blocks any more."""
        with self._lock:
            for block in blocks:
                self._quarantined.remove(block)
                heapq.heappush(self._free, block)
        self._tell_freed()

    def match_prefix(self, hashes: Sequence[bytes]) -> list[int]:
        """Takes a hold on the blocks of the longest known prefix and returns them in order."""
        with self._lock:
            blocks: list[int] = []
            for block_hash in hashes:
                block = self._block_of.get(block_hash)
                if block is None:
                    break
                self._cached.pop(block, None)
                self._references[block] = self._references.get(block, 0) + 1
                blocks.append(block)
            return blocks

    def publish(self, block: int, block_hash: bytes) -> None:
        """Makes a held, full and final block findable. Of two equal blocks the first stays it."""
        if not self.enable_prefix_cache:
            return
        with self._lock:
            assert block in self._references, f"block {block} is not held"
            if block_hash in self._block_of or block in self._hash_of:
                return
            self._hash_of[block] = block_hash
            self._block_of[block_hash] = block
            self.events.record(stored=[block_hash])

    def unpublish(self, blocks: Sequence[int]) -> None:
        """Makes held blocks unfindable: nobody shall use what they hold again."""
        with self._lock:
            self._forget(block for block in blocks if block in self._hash_of)

    def check_integrity(self) -> None:
        """Raises AssertionError unless every block is in exactly one state."""
        with self._lock:
            states = [*self._free, *self._references, *self._cached, *self._quarantined]
            assert sorted(states) == list(range(self.num_blocks)), "blocks lost or in two states"
            assert all(count > 0 for count in self._references.values()), "hold count below one"
            assert {h: b for b, h in self._hash_of.items()} == self._block_of, "hashes disagree"
            hashed = self._hash_of.keys()
            assert self._cached.keys() <= hashed, "a cached block has no hash"
            assert not hashed & {*self._free, *self._quarantined}, "a void block has a hash"

    def _tell_freed(self) -> None:
        for callback in self._freed_callbacks:
            callback()

    def _num_free(self) -> int:
        return len(self._free) + len(self._cached)

    def _drop_reference(self, block: int) -> bool:
        """True when that was the last hold."""
        self._references[block] -= 1
        if self._references[block]:
            return False
        del self._references[block]
        return True

    def _forget(self, blocks: Iterable[int]) -> None:
        removed = [self._hash_of.pop(block) for block in list(blocks)]
        for block_hash in removed:
            del self._block_of[block_hash]
        self.events.record(removed=removed)
