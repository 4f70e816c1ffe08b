"""The prefill worker's running set and the queue before it."""

import asyncio

import pytest

from epd.errors import ResourceExhaustedError
from services.prefill.admission import Admission


async def hold(admission: Admission, order: list[str], name: str, leave: asyncio.Event) -> None:
    async with admission.slot(token_count=10):
        order.append(name)
        await leave.wait()


async def test_slots_are_handed_out_in_order_of_arrival() -> None:
    admission = Admission(max_running=1, max_waiting=8, wait_timeout_s=5)
    order: list[str] = []
    leave = asyncio.Event()
    tasks = []
    for name in "abcd":
        tasks.append(asyncio.create_task(hold(admission, order, name, leave)))
        await asyncio.sleep(0)
    assert (admission.running, admission.waiting, admission.waiting_tokens) == (1, 3, 30)
    leave.set()
    await asyncio.gather(*tasks)
    assert order == ["a", "b", "c", "d"]
    assert (admission.running, admission.waiting, admission.waiting_tokens) == (0, 0, 0)


async def test_a_full_queue_refuses_at_once_with_a_retry_hint() -> None:
    admission = Admission(max_running=1, max_waiting=1, wait_timeout_s=5)
    leave = asyncio.Event()
    tasks = [asyncio.create_task(hold(admission, [], name, leave)) for name in "ab"]
    await asyncio.sleep(0)
    with pytest.raises(ResourceExhaustedError) as refusal:
        async with admission.slot(token_count=1):
            pass
    assert refusal.value.reason == "QUEUE_FULL"
    assert refusal.value.retry_after_s > 0
    leave.set()
    await asyncio.gather(*tasks)


async def test_a_wait_ends_at_its_bound_and_leaves_the_queue() -> None:
    admission = Admission(max_running=1, max_waiting=4, wait_timeout_s=0.05)
    leave = asyncio.Event()
    task = asyncio.create_task(hold(admission, [], "a", leave))
    await asyncio.sleep(0)
    with pytest.raises(ResourceExhaustedError) as refusal:
        async with admission.slot(token_count=7):
            pass
    assert refusal.value.reason == "QUEUE_TIMEOUT"
    assert (admission.waiting, admission.waiting_tokens) == (0, 0)
    leave.set()
    await task


async def test_a_cancelled_waiter_frees_its_place_and_no_slot_is_lost() -> None:
    admission = Admission(max_running=1, max_waiting=1, wait_timeout_s=5)
    leave = asyncio.Event()
    order: list[str] = []
    first = asyncio.create_task(hold(admission, order, "a", leave))
    waiter = asyncio.create_task(hold(admission, order, "b", leave))
    await asyncio.sleep(0)
    waiter.cancel()
    await asyncio.gather(waiter, return_exceptions=True)
    assert admission.waiting == 0
    leave.set()
    await first
    async with admission.slot(token_count=1):
        assert admission.running == 1
