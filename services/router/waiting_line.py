"""Who may be prefilled next: bounded queues by priority, fair between clients."""

import asyncio
import contextlib
import enum
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field

from epd.errors import ResourceExhaustedError

_FADE = 0.9


class Priority(enum.IntEnum):
    """Class of a request; lower numbers go first."""

    HIGH = 0
    NORMAL = 1
    LOW = 2


@dataclass(frozen=True)
class LineBounds:
    """Bounds of a line.

    Args:
        max_waiting: Most requests that wait per priority; one more is refused.
        wait_s: Longest wait.
    """

    max_waiting: int
    wait_s: float


class Turn:
    """A place among the requests that are being prefilled."""

    def __init__(self, line: "WaitingLine", client: str) -> None:
        self._line = line
        self._client = client
        self._started_s = time.monotonic()
        self._over = False

    def over(self) -> None:
        """The first token is there, or never will be; later calls change nothing."""
        if not self._over:
            self._over = True
            self._line.release(self._client, time.monotonic() - self._started_s)


@dataclass(eq=False)
class _Waiter:
    client: str
    ready: "asyncio.Future[None]" = field(
        default_factory=lambda: asyncio.get_running_loop().create_future()
    )


class WaitingLine:
    """Hands out places among the requests between dispatch and first token.

    A higher priority always goes first. Within one, the client with the fewest places goes first,
    and of its requests the one that came first, so a client with a thousand requests waiting delays
    another's one by no more than the places it already has. Lower priorities may wait until their
    time is up; then they are refused, so no queue grows old.

    Lives on one event loop.

    Args:
        capacity: How many places there are now.
        bounds: Of the queues.
    """

    def __init__(self, capacity: Callable[[], int], bounds: LineBounds) -> None:
        self._capacity = capacity
        self._bounds = bounds
        self._queues: dict[Priority, list[_Waiter]] = {priority: [] for priority in Priority}
        self._places: Counter[str] = Counter()
        self._taken = 0
        self._held_s = 0.0

    @property
    def waiting(self) -> int:
        """Requests that wait."""
        return sum(map(len, self._queues.values()))

    def expected_wait_s(self, priority: Priority) -> float:
        """How long a request that came now would probably wait for its turn."""
        ahead = sum(len(self._queues[other]) for other in Priority if other <= priority)
        if not ahead and self._taken < self._capacity():
            return 0.0
        return (ahead + 1) * self._held_s / self._capacity()

    @contextlib.asynccontextmanager
    async def turn(
        self, priority: Priority, client: str, remaining_s: float
    ) -> AsyncIterator[Turn]:
        """Waits for a place; it is given back at the first token, or when the block is left.

        Args:
            priority: Which queue.
            client: Whose share of the places it counts for.
            remaining_s: What is left until the request's own deadline.

        Raises:
            ResourceExhaustedError: the queue is full, or the wait has passed its bound.
        """
        await self._enter(priority, client, remaining_s)
        turn = Turn(self, client)
        try:
            yield turn
        finally:
            turn.over()

    def release(self, client: str, held_s: float) -> None:
        """A place is free again."""
        self._taken -= 1
        self._places[client] -= 1
        if not self._places[client]:
            del self._places[client]
        self._held_s = _FADE * self._held_s + (1 - _FADE) * held_s if self._held_s else held_s
        self._admit()

    async def _enter(self, priority: Priority, client: str, remaining_s: float) -> None:
        queue = self._queues[priority]
        if not self.waiting and self._taken < self._capacity():
            self._take(client)
            return
        if len(queue) >= self._bounds.max_waiting:
            raise ResourceExhaustedError(
                f"{len(queue)} requests of priority {priority.name} wait already",
                reason="QUEUE_FULL",
                retry_after_s=max(0.1, self.expected_wait_s(priority)),
            )
        waiter = _Waiter(client)
        queue.append(waiter)
        self._admit()
        try:
            async with asyncio.timeout(min(self._bounds.wait_s, remaining_s)):
                await waiter.ready
        except BaseException as error:
            if waiter in queue:
                queue.remove(waiter)
            elif waiter.ready.done() and not waiter.ready.cancelled():
                self.release(client, self._held_s)  # it came too late
            if isinstance(error, TimeoutError):
                raise ResourceExhaustedError(
                    f"no turn within {min(self._bounds.wait_s, remaining_s):.1f} s",
                    reason="QUEUE_TIMEOUT",
                    retry_after_s=max(0.1, self.expected_wait_s(priority)),
                ) from None
            raise

    def _admit(self) -> None:
        for priority in Priority:
            queue = self._queues[priority]
            while queue and self._taken < self._capacity():
                waiter = min(queue, key=lambda waiter: self._places[waiter.client])
                queue.remove(waiter)
                if not waiter.ready.cancelled():  # it gave up, and has not run since
                    self._take(waiter.client)
                    waiter.ready.set_result(None)

    def _take(self, client: str) -> None:
        self._taken += 1
        self._places[client] += 1
