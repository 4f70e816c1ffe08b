"""Which blocks of prompts one worker holds in its prefix cache, as far as the router knows.

The hash of a block covers everything before it, so a flat set of hashes is a radix tree of prompts:
walking a prompt's hashes until one is missing finds its longest known prefix.
"""

import time
from collections import OrderedDict
from collections.abc import Callable, Sequence


class EventGapError(Exception):
    """Changes were lost: the view is void until a full list comes."""


class HeldBlocks:
    """The view of one worker's cache, from two sources.

    What the worker tells is exact but late. What this router has sent there is assumed to be held
    for a while: shortly where the worker tells, to bridge the time until it does, and longer where
    it does not (the approximate mode).

    Args:
        capacity: Most blocks remembered per source; the oldest are forgotten first.
        bridge_s: How long an assumption lasts where the worker tells.
        assumed_s: How long it lasts in approximate mode.
        clock: Seconds, monotonic.
    """

    def __init__(
        self,
        capacity: int,
        bridge_s: float,
        assumed_s: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._capacity = capacity
        self._bridge_s = bridge_s
        self._assumed_s = assumed_s
        self._clock = clock
        self._told: OrderedDict[bytes, None] = OrderedDict()
        #: Hash to the time until which it is assumed; ordered by that time.
        self._assumed: OrderedDict[bytes, float] = OrderedDict()
        self._sequence: int | None = None

    @property
    def is_told(self) -> bool:
        """Whether the worker tells its changes now."""
        return self._sequence is not None

    def __len__(self) -> int:
        return len(self._told) + len(self._assumed)

    def apply(
        self, sequence: int, stored: Sequence[bytes], removed: Sequence[bytes], *, cleared: bool
    ) -> None:
        """Takes one change. A long one comes in parts, which share a sequence number.

        Raises:
            EventGapError: a change between the last one and this one is missing.
        """
        if cleared:
            self._told.clear()
        elif self._sequence is None or sequence not in (self._sequence, self._sequence + 1):
            self.lost()
            raise EventGapError(f"change {sequence} follows {self._sequence}")
        self._sequence = sequence
        for block_hash in removed:
            self._told.pop(block_hash, None)
            self._assumed.pop(block_hash, None)
        for block_hash in stored:
            self._told[block_hash] = None
            self._assumed.pop(block_hash, None)
        while len(self._told) > self._capacity:
            self._told.popitem(last=False)

    def lost(self) -> None:
        """The worker tells nothing any more: what it has told goes out of date."""
        self._sequence = None
        self._told.clear()

    def assume(self, hashes: Sequence[bytes]) -> None:
        """A prompt with these blocks has been sent to the worker."""
        until = self._clock() + (self._bridge_s if self.is_told else self._assumed_s)
        for block_hash in hashes:
            if block_hash not in self._told:
                self._assumed[block_hash] = until
                self._assumed.move_to_end(block_hash)
        while len(self._assumed) > self._capacity:
            self._assumed.popitem(last=False)

    def leading(self, hashes: Sequence[bytes]) -> int:
        """How many of a prompt's blocks, from the first on, are held."""
        now = self._clock()
        for count, block_hash in enumerate(hashes):
            if block_hash not in self._told and self._assumed.get(block_hash, -1.0) < now:
                return count
        return len(hashes)
