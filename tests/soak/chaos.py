"""Workers that hang, go silent, die and come back."""

import asyncio
import random
import signal
from collections import Counter

from tests.support.fleet import TestFleet

WORKERS = ("prefill-0", "prefill-1", "decode-0", "decode-1", "encoder-0")
#: A hang that passes, and one that peers take for a death (3 s).
HANGS = ("hang", "hang", "silence")


class Chaos:
    """At most one worker is dead and one stopped at a time."""

    def __init__(self, fleet: TestFleet, source: random.Random) -> None:
        self.done: Counter[str] = Counter()
        self._fleet = fleet
        self._source = source
        self._struck: set[str] = set()

    async def run(self, stop: asyncio.Event) -> None:
        """Until ``stop``; afterwards every worker runs."""
        async with asyncio.TaskGroup() as group:
            group.create_task(self._hang(stop))
            group.create_task(self._kill(stop))

    async def _hang(self, stop: asyncio.Event) -> None:
        while not stop.is_set():
            # A shuffled deck: every kind comes up in a short run too.
            for kind in self._source.sample(HANGS, len(HANGS)):
                await asyncio.sleep(self._source.uniform(0.5, 2.0))
                # Less than after what a peer hands memory out again: 3 s and the hold time.
                length_s = self._source.uniform(*((3.2, 4.5) if kind == "silence" else (0.1, 1.5)))
                victim = self._pick()
                self._fleet.signal(victim, signal.SIGSTOP)
                try:
                    await asyncio.sleep(length_s)
                finally:
                    self._fleet.signal(victim, signal.SIGCONT)
                    self._struck.discard(victim)
                    self.done[kind] += 1

    async def _kill(self, stop: asyncio.Event) -> None:
        while not stop.is_set():
            await asyncio.sleep(self._source.uniform(1.0, 4.0))
            victim = self._pick()
            self._fleet.kill_one(victim)
            await asyncio.to_thread(self._fleet.restart, victim)
            self._struck.discard(victim)
            self.done["kill"] += 1

    def _pick(self) -> str:
        victim = self._source.choice([name for name in WORKERS if name not in self._struck])
        self._struck.add(victim)
        return victim
