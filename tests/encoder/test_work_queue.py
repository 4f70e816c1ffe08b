import asyncio

import pytest
from hypothesis import given
from hypothesis import strategies as st

from epd.encoding.pixel_budget import PixelBudget
from epd.encoding.work_queue import WorkQueue


def test_least_work_goes_first() -> None:
    queue: WorkQueue[str] = WorkQueue(ageing_per_s=10)
    for name, work in (("large", 100), ("small", 1), ("middle", 50)):
        queue.push(name, work, now_s=0.0)
    assert [queue.pop() for _ in range(3)] == ["small", "middle", "large"]


def test_waiting_outweighs_work_in_the_end() -> None:
    queue: WorkQueue[str] = WorkQueue(ageing_per_s=10)
    queue.push("large", 100, now_s=0.0)
    queue.push("early", 1, now_s=9.0)
    queue.push("late", 1, now_s=11.0)
    assert [queue.pop() for _ in range(3)] == ["early", "large", "late"]


def test_batch_keeps_the_budget_but_never_starves_the_largest() -> None:
    queue: WorkQueue[int] = WorkQueue(ageing_per_s=0)
    for work in (5, 4, 3, 20):
        queue.push(work, work, now_s=0.0)
    assert queue.pop_batch(budget=8, max_items=8) == [3, 4]
    assert queue.pop_batch(budget=8, max_items=8) == [5]
    assert queue.pop_batch(budget=8, max_items=8) == [20]
    assert queue.pop_batch(budget=8, max_items=8) == []


@given(st.lists(st.tuples(st.integers(1, 50), st.booleans())))
def test_work_is_the_sum_of_what_waits(items: list[tuple[int, bool]]) -> None:
    queue: WorkQueue[tuple[int, bool]] = WorkQueue(ageing_per_s=1)
    for n, item in enumerate(items):
        queue.push(item, item[0], now_s=n)
    gone = queue.discard(lambda item: item[1])
    assert sorted(gone) == sorted(item for item in items if item[1])
    assert queue.work == sum(work for work, unwanted in items if not unwanted)
    rest = [queue.pop() for _ in range(len(queue))]
    assert queue.work == 0
    assert sorted(rest) == sorted(item for item in items if not item[1])


async def test_pixel_budget_admits_what_fits_and_the_oversized_alone() -> None:
    budget = PixelBudget(limit_bytes=10, ageing_bytes_per_s=0)
    running: list[int] = []
    most = 0

    async def use(size: int) -> None:
        nonlocal most
        async with budget.hold(size):
            running.append(size)
            assert sum(running) <= 10 or running == [size]
            most = max(most, len(running))
            await asyncio.sleep(0.005)
            running.remove(size)

    await asyncio.gather(*(use(size) for size in (4, 25, 6, 3, 9, 3, 3, 10)))
    assert most > 1
    assert budget.held_bytes == budget.waiting_images == 0


async def test_cancelled_waiter_leaves_the_pixel_budget_whole() -> None:
    budget = PixelBudget(limit_bytes=10, ageing_bytes_per_s=0)

    async def use() -> None:
        async with budget.hold(8):
            await asyncio.sleep(60)

    tasks = [asyncio.create_task(use()) for _ in range(3)]
    await asyncio.sleep(0)
    assert (budget.held_bytes, budget.waiting_images) == (8, 2)
    tasks[1].cancel()
    await asyncio.gather(tasks[1], return_exceptions=True)
    assert (budget.held_bytes, budget.waiting_images) == (8, 1)
    tasks[0].cancel()
    tasks[2].cancel()  # admitted by the first one's end in the same moment
    with pytest.raises(asyncio.CancelledError):
        await tasks[2]
    assert budget.held_bytes == budget.waiting_images == 0
