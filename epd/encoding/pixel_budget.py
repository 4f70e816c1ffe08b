"""A bound on the decoded pixels that wait for the vision tower."""

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from epd.encoding.work_queue import WorkQueue


class PixelBudget:
    """Lets images into preprocessing while their pixels fit into ``limit_bytes``, least first.

    An image larger than the limit goes alone. Callers bound the number of waiters. Lives on one
    event loop.
    """

    def __init__(self, limit_bytes: int, ageing_bytes_per_s: float) -> None:
        self._limit_bytes = limit_bytes
        self._waiting: WorkQueue[tuple[asyncio.Future[None], int]] = WorkQueue(ageing_bytes_per_s)
        self.held_bytes = 0

    @property
    def waiting_images(self) -> int:
        """Images that wait for room."""
        return len(self._waiting)

    @asynccontextmanager
    async def hold(self, byte_count: int) -> AsyncIterator[None]:
        """Waits for room for that many bytes of pixels and holds it."""
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.push((turn, byte_count), byte_count, time.monotonic())
        self._admit()
        try:
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():  # admitted and cancelled in the same moment
                self._give_back(byte_count)
            else:
                self._waiting.discard(lambda waiter: waiter[0] is turn)
            raise
        try:
            yield
        finally:
            self._give_back(byte_count)

    def _give_back(self, byte_count: int) -> None:
        self.held_bytes -= byte_count
        self._admit()

    def _admit(self) -> None:
        while len(self._waiting):
            turn, byte_count = self._waiting.peek()
            if self.held_bytes and self.held_bytes + byte_count > self._limit_bytes:
                return
            self._waiting.pop()
            if not turn.done():
                self.held_bytes += byte_count
                turn.set_result(None)
