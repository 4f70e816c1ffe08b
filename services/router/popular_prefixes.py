"""Which prefixes are so popular that every worker will hold them."""

from collections import Counter, deque
from collections.abc import Sequence


class PopularPrefixes:
    """Counts blocks over the last requests.

    A prefix that only some requests share (a document, a conversation) is best computed once, on
    one worker. A prefix in more than one worker's share of all requests (a system prompt) is not:
    sending all of its requests to whoever computed it first would leave the others idle. So blocks
    above that share give no worker an advantage, each worker computes them once, and the requests
    spread.

    A request that continues an earlier one (the next turn of a conversation) takes its place: one
    conversation alone is never popular.

    Args:
        requests: Most requests remembered.
        blocks: Most blocks of all remembered requests together.
    """

    def __init__(self, requests: int = 256, blocks: int = 32_768) -> None:
        self._max_requests = requests
        self._max_blocks = blocks
        self._window: deque[tuple[bytes, ...]] = deque()
        self._counts: Counter[bytes] = Counter()
        self._last_blocks: Counter[bytes] = Counter()
        self._blocks = 0

    def __len__(self) -> int:
        """Blocks of all remembered requests."""
        return self._blocks

    def add(self, hashes: Sequence[bytes]) -> None:
        """Notes a request by its block hashes; only as many as fit the bound are kept."""
        kept = tuple(hashes[: self._max_blocks // 8])
        if not kept:
            return
        self._forget_continued(kept)
        self._window.append(kept)
        self._counts.update(kept)
        self._last_blocks[kept[-1]] += 1
        self._blocks += len(kept)
        while len(self._window) > self._max_requests or self._blocks > self._max_blocks:
            self._forget(self._window.popleft())

    def leading(self, hashes: Sequence[bytes], workers: int) -> int:
        """How many of a prompt's blocks, from the first on, are popular among ``workers``."""
        share = len(self._window) / workers
        for count, block_hash in enumerate(hashes):
            seen = self._counts[block_hash]
            if seen < 2 or seen <= share:
                return count
        return len(hashes)

    def _forget_continued(self, hashes: tuple[bytes, ...]) -> None:
        """Drops the latest request of which this one is a longer version."""
        if not any(self._last_blocks[block_hash] for block_hash in hashes[:-1]):
            return
        ends = set(hashes[:-1])
        for position in range(len(self._window) - 1, -1, -1):
            if self._window[position][-1] in ends:
                earlier = self._window[position]
                del self._window[position]
                self._forget(earlier)
                return

    def _forget(self, hashes: tuple[bytes, ...]) -> None:
        self._blocks -= len(hashes)
        self._last_blocks[hashes[-1]] -= 1
        if not self._last_blocks[hashes[-1]]:
            del self._last_blocks[hashes[-1]]
        for block_hash in hashes:
            self._counts[block_hash] -= 1
            if not self._counts[block_hash]:
                del self._counts[block_hash]
