"""Waiting work: least first, but nothing waits for ever. Plain Python."""

import heapq
import itertools
from collections.abc import Callable
from typing import Generic, TypeVar

T = TypeVar("T")


class WorkQueue(Generic[T]):
    """Orders items by work minus ``ageing_per_s`` times the seconds waited.

    All items age alike, so the order of two never changes while they wait: the key is fixed at
    arrival, and a plain heap serves.

    Args:
        ageing_per_s: Work units that a second of waiting is worth.
    """

    def __init__(self, ageing_per_s: float) -> None:
        self._ageing_per_s = ageing_per_s
        self._heap: list[tuple[float, int, int, T]] = []
        self._arrivals = itertools.count()
        self.work = 0

    def __len__(self) -> int:
        return len(self._heap)

    def push(self, item: T, work: int, now_s: float) -> None:
        """Takes in an item of ``work`` units that arrives at ``now_s``, on a monotonic clock."""
        key = work + self._ageing_per_s * now_s
        heapq.heappush(self._heap, (key, next(self._arrivals), work, item))
        self.work += work

    def peek(self) -> T:
        """The first item, left in."""
        return self._heap[0][3]

    def pop(self) -> T:
        """Takes out the first item."""
        _, _, work, item = heapq.heappop(self._heap)
        self.work -= work
        return item

    def pop_batch(self, budget: int, max_items: int) -> list[T]:
        """Takes out the first item, whatever it weighs, and those in order behind it that fit."""
        batch: list[T] = []
        spent = 0
        while self._heap and len(batch) < max_items:
            work = self._heap[0][2]
            if batch and spent + work > budget:
                break
            spent += work
            batch.append(self.pop())
        return batch

    def discard(self, unwanted: Callable[[T], bool]) -> list[T]:
        """Takes out all items that answer True."""
        gone = [entry for entry in self._heap if unwanted(entry[3])]
        if gone:
            self._heap = [entry for entry in self._heap if not unwanted(entry[3])]
            heapq.heapify(self._heap)
            self.work -= sum(entry[2] for entry in gone)
        return [entry[3] for entry in gone]
