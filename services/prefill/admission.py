"""Who may start: a bounded first-come-first-served queue before a bounded running set."""

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from epd.errors import ResourceExhaustedError


class Admission:
    """Slots of the running set, handed out in order of arrival.

    A waiter holds nothing: no block, no embedding, no reservation. Lives on one event loop.

    Args:
        max_running: Most requests inside :meth:`slot` at once.
        max_waiting: Most requests that wait for a slot; one more is refused.
        wait_timeout_s: Longest wait for a slot.
    """

    def __init__(self, max_running: int, max_waiting: int, wait_timeout_s: float) -> None:
        self._slots = asyncio.Semaphore(max_running)
        self._max_waiting = max_waiting
        self._wait_timeout_s = wait_timeout_s
        self.running = 0
        self.waiting = 0
        #: Prompt tokens of the requests that wait.
        self.waiting_tokens = 0

    @asynccontextmanager
    async def slot(self, token_count: int) -> AsyncIterator[int]:
        """Waits for a slot and holds it; yields the wait in nanoseconds.

        Raises:
            ResourceExhaustedError: the queue is full, or the wait has passed its bound.
        """
        started = time.monotonic_ns()
        await self._acquire(token_count)
        self.running += 1
        try:
            yield time.monotonic_ns() - started
        finally:
            self.running -= 1
            self._slots.release()

    async def _acquire(self, token_count: int) -> None:
        if self._slots.locked() and self.waiting >= self._max_waiting:
            raise ResourceExhaustedError(
                f"{self.waiting} requests wait for prefill, the limit is {self._max_waiting}",
                reason="QUEUE_FULL",
            )
        self.waiting += 1
        self.waiting_tokens += token_count
        try:
            async with asyncio.timeout(self._wait_timeout_s):
                await self._slots.acquire()
        except TimeoutError:
            raise ResourceExhaustedError(
                f"no place among the running requests within {self._wait_timeout_s} s",
                reason="QUEUE_TIMEOUT",
            ) from None
        finally:
            self.waiting -= 1
            self.waiting_tokens -= token_count
