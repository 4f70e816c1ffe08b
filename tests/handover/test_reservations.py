"""Reservations: idempotent, shared fairly, waited for in order, and never somebody else's."""

import asyncio

import pytest

from epd.errors import (
    DuplicateRequestError,
    InvalidRequestError,
    ResourceExhaustedError,
    TransferFailedError,
)
from epd.handover.lease import LeaseState
from epd.handover.lease_config import LeaseConfig
from epd.transfer.base import AgentDescriptor
from tests.handover.sides import eventually


async def test_reserve_and_fail_are_idempotent(make):
    async with make().running() as pair:
        first = await pair.control.reserve("t", 40)
        assert await pair.control.reserve("t", 40) == first
        for _ in range(2):
            await pair.control.fail("t", TransferFailedError("x"), True)
        await pair.control.settle(["t", "unheard of"])
        with pytest.raises(TransferFailedError, match="x"):
            await pair.control.reserve("t", 40)
        await pair.idle()


async def test_one_peer_cannot_take_more_than_its_share(make):
    async with make(decode={"num_blocks": 16}).running() as pair:
        await pair.control.reserve("a", 6 * 16)
        with pytest.raises(ResourceExhaustedError, match="holds 6 blocks"):
            await pair.control.reserve("b", 3 * 16)
        pair.decode.receiver.cancel("a")  # quarantined blocks count as held
        with pytest.raises(ResourceExhaustedError):
            await pair.control.reserve("c", 3 * 16)
        await pair.control.settle(["a"])
        await pair.control.reserve("d", 8 * 16)
        await pair.control.fail("d", TransferFailedError("x"), True)
        await pair.idle()


async def test_more_than_a_peer_may_ever_hold_is_refused_for_good(make):
    async with make(decode={"num_blocks": 16}).running() as pair:
        with pytest.raises(InvalidRequestError, match=r"9 blocks; .* of 16 gives .* 8 at most"):
            await pair.control.reserve("a", 9 * 16)  # a hint to try again would be a lie
        await pair.idle()


async def test_reserve_waits_for_blocks_in_order_and_is_bounded(make):
    leases = LeaseConfig(peer_share=1.0)
    decode = {"num_blocks": 8, "leases": leases, "max_waiting": 2, "reserve_timeout_s": 60}
    async with make(decode=decode).running() as pair:
        held = pair.decode.pool.allocate(8)
        large = asyncio.create_task(pair.control.reserve("large", 6 * 16))
        await asyncio.sleep(0.01)
        small = asyncio.create_task(pair.control.reserve("small", 16))
        await asyncio.sleep(0.01)
        with pytest.raises(ResourceExhaustedError, match="limit is 2"):
            await pair.control.reserve("third", 16)
        pair.decode.pool.free(held[:2])
        await asyncio.sleep(0.1)
        assert not small.done()  # it would fit, but the large one came first
        pair.decode.pool.free(held[2:])
        assert len((await large).block_ids) == 6
        assert len((await small).block_ids) == 1
        pair.decode.pool.allocate(1)
        pair.decode.receiver._queue._timeout_s = 0.2
        with pytest.raises(ResourceExhaustedError, match="no KV blocks"):
            await pair.control.reserve("late", 16)
        pair.decode.pool.free([7])
        for transfer_id in ("large", "small"):
            await pair.control.fail(transfer_id, TransferFailedError("x"), True)
        await pair.idle()


async def test_a_reserve_call_that_goes_away_leaves_the_queue(make):
    async with make(decode={"num_blocks": 8}).running() as pair:
        held = pair.decode.pool.allocate(8)
        waiting = asyncio.create_task(pair.control.reserve("t", 16))
        await eventually(lambda: pair.decode.receiver.waiting_reservations == 1)
        waiting.cancel()
        await asyncio.wait({waiting})
        assert pair.decode.receiver.waiting_reservations == 0
        pair.decode.pool.free(held)
        await pair.idle()


async def test_a_reservation_for_nothing_is_refused(make):
    async with make().running() as pair:
        with pytest.raises(InvalidRequestError):
            await pair.control.reserve("t", 0)
        with pytest.raises(InvalidRequestError, match="2 blocks cannot be full with 31 tokens"):
            await pair.control.reserve("t", 31, [b"a", b"b"])


async def test_an_id_that_belongs_to_another_prefill_worker_is_left_alone(make):
    async with make().running() as pair:
        await pair.control.reserve("t", 40)
        other = AgentDescriptor("other", "other", "nixl", b"")
        pair.decode.receiver.peer_arrived(other)
        pair.control.sender_instance_id = "other"
        with pytest.raises(DuplicateRequestError, match="another prefill worker"):
            await pair.prefill.run_request("t", pair.target, 40)
        assert pair.decode.receiver.leases.get("t").state is LeaseState.RESERVED
        await pair.control.fail("t", TransferFailedError("x"), True)
        await pair.idle()
