"""Turns: bounded, by priority, fair between clients, given back on every path."""

import asyncio
import contextlib

import pytest

from epd.errors import ResourceExhaustedError
from services.router.waiting_line import LineBounds, Priority, WaitingLine


def line(capacity: int = 1, max_waiting: int = 100, wait_s: float = 60.0) -> WaitingLine:
    return WaitingLine(lambda: capacity, LineBounds(max_waiting, wait_s))


async def arrive(
    waiting: WaitingLine, order: list[str], name: str, client: str, priority: Priority
) -> None:
    async with waiting.turn(priority, client, 60.0):
        order.append(name)
        await asyncio.sleep(0)


async def arrivals(waiting: WaitingLine, names: list[tuple[str, str, Priority]]) -> list[str]:
    """The order in which requests get their turn that all came while the line was full."""
    order: list[str] = []
    async with asyncio.TaskGroup() as group, waiting.turn(Priority.HIGH, "before", 60.0):
        for name, client, priority in names:
            group.create_task(arrive(waiting, order, name, client, priority))
            await asyncio.sleep(0)
        assert waiting.waiting == len(names)
    assert waiting.waiting == 0
    return order


async def test_higher_priorities_go_first_and_equal_ones_in_the_order_they_came() -> None:
    names = [("l1", "a", Priority.LOW), ("n1", "a", Priority.NORMAL), ("h1", "a", Priority.HIGH)]
    names += [(name.replace("1", "2"), client, priority) for name, client, priority in names]
    assert await arrivals(line(), names) == ["h1", "h2", "n1", "n2", "l1", "l2"]


async def test_a_client_with_many_requests_does_not_delay_another_behind_them_all() -> None:
    waiting = line(capacity=3)
    async with contextlib.AsyncExitStack() as stack:
        for _ in range(3):
            await stack.enter_async_context(waiting.turn(Priority.NORMAL, "greedy", 60.0))
        order: list[str] = []
        many = [
            asyncio.create_task(arrive(waiting, order, f"g{n}", "greedy", Priority.NORMAL))
            for n in range(20)
        ]
        await asyncio.sleep(0)
        modest = asyncio.create_task(arrive(waiting, order, "m", "modest", Priority.NORMAL))
        await asyncio.sleep(0)
    await asyncio.gather(modest, *many)
    assert order[0] == "m"


async def test_a_full_queue_refuses_with_a_hint_and_only_its_own_priority() -> None:
    waiting = line(max_waiting=1)
    async with waiting.turn(Priority.NORMAL, "a", 60.0) as turn:
        order: list[str] = []
        waiter = asyncio.create_task(arrive(waiting, order, "w", "a", Priority.NORMAL))
        await asyncio.sleep(0)
        with pytest.raises(ResourceExhaustedError) as refused:
            await arrive(waiting, order, "x", "a", Priority.NORMAL)
        assert refused.value.reason == "QUEUE_FULL"
        assert refused.value.retry_after_s > 0
        high = asyncio.create_task(arrive(waiting, order, "h", "a", Priority.HIGH))
        await asyncio.sleep(0)
        turn.over()
        await asyncio.gather(waiter, high)
    assert order == ["h", "w"]


async def test_a_wait_ends_at_its_bound_and_leaves_nothing() -> None:
    waiting = line(wait_s=0.05)
    async with waiting.turn(Priority.NORMAL, "a", 60.0):
        with pytest.raises(ResourceExhaustedError) as refused:
            await arrive(waiting, [], "x", "b", Priority.NORMAL)
        assert refused.value.reason == "QUEUE_TIMEOUT"
        assert waiting.waiting == 0
    await arrive(waiting, [], "y", "b", Priority.NORMAL)


async def test_turns_are_given_back_whatever_ends_the_request() -> None:
    """First token, error, cancel while waiting and while running."""
    waiting = line(capacity=2)
    for _ in range(20):
        async with waiting.turn(Priority.NORMAL, "a", 60.0) as turn:
            turn.over()
            turn.over()
        with contextlib.suppress(ZeroDivisionError):
            async with waiting.turn(Priority.NORMAL, "a", 60.0):
                raise ZeroDivisionError
        holders = [asyncio.create_task(_hold(waiting)) for _ in range(4)]
        await asyncio.sleep(0)
        for holder in reversed(holders):
            holder.cancel()
        await asyncio.wait(holders)
    assert waiting.expected_wait_s(Priority.LOW) == 0.0
    async with (
        waiting.turn(Priority.LOW, "a", 60.0),
        waiting.turn(Priority.LOW, "a", 60.0),
    ):
        assert waiting.waiting == 0


async def _hold(waiting: WaitingLine) -> None:
    async with waiting.turn(Priority.NORMAL, "a", 60.0):
        await asyncio.sleep(60)
