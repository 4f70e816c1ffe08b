"""WRITEs that run on, or land, when their push is over: whose memory is it then."""

import asyncio
import dataclasses
import threading

import pytest

from epd.errors import (
    DuplicateRequestError,
    TransferFailedError,
    UnavailableError,
)
from epd.handover.lease import LeaseState
from epd.handover.lease_config import LeaseConfig
from tests.handover.sides import eventually
from tests.transfer.held import HELD

LAYERS = 4
#: For tests that wait until a lease has run out. In all others that would take a minute.
BRIEF = LeaseConfig(progress_timeout_s=1.0, settle_grace_s=0.3, hold_s=0.5)


async def test_blocks_in_quarantine_are_not_handed_out(make):
    """F11: the lease ends while a WRITE runs; the next reservation gets other blocks."""
    async with make(decode={"num_blocks": 12}).running() as pair:
        pair.prefill.faults.delay[1] = HELD
        push = asyncio.create_task(pair.prefill.run_request("a", pair.target, 80, pause_s=0.3))
        await eventually(lambda: pair.prefill.faults.writes)
        lease = pair.decode.receiver.leases.get("a")
        pair.decode.receiver.cancel("a")
        assert pair.decode.pool.num_quarantined == 5
        other = await pair.decode.receiver.reserve("b", pair.prefill.descriptor.instance_id, 16)
        assert not set(other.block_ids) & set(lease.block_ids)
        assert lease.state is LeaseState.QUARANTINED
        pair.prefill.backend.let_go()
        with pytest.raises(TransferFailedError, match="given up"):
            await push
        pair.decode.receiver.fail("b", TransferFailedError("x"), settled=True)
        await pair.idle()


async def test_a_write_that_lands_after_its_lease_finds_its_blocks_in_quarantine(make):
    """F05: nobody else has had them, and they are free once the writer has settled."""
    async with make(decode={"num_blocks": 16, "leases": BRIEF}).running() as pair:
        prefill, decode = pair.prefill, pair.decode
        prefill.faults.late[1] = HELD
        waiting = asyncio.create_task(decode.receiver.wait_sealed("t", 30))
        pushing = asyncio.create_task(prefill.run_request("t", pair.target, 40))
        with pytest.raises(TransferFailedError):
            await waiting
        lost = set(decode.receiver.leases.get("t").block_ids)
        assert decode.pool.num_quarantined == 3
        others = decode.pool.allocate(decode.pool.num_free)
        assert lost.isdisjoint(others)
        assert not any(decode.block(0, block).any() for block in range(16)), "nothing landed yet"
        prefill.backend.let_go()
        with pytest.raises(TransferFailedError):
            await pushing
        assert not any(decode.block(0, block).any() for block in others)
        assert all(decode.block(0, block).any() for block in lost), "the WRITE did land"
        decode.pool.free(others)
        await pair.idle()


async def test_a_write_of_a_push_cancelled_twice_never_carries_the_next_requests_kv(make):
    """The seal is there already and the word that the push was given up is lost: decode takes the
    transfer for whole, and it has to be.
    """
    async with make().running() as pair:
        prefill, decode = pair.prefill, pair.decode
        prefill.faults.late[1] = HELD
        waiting = asyncio.create_task(decode.receiver.wait_sealed("t", 60))
        pushing = asyncio.create_task(prefill.run_request("t", pair.target, 40))
        await eventually(lambda: prefill.faults.writes > LAYERS)
        computed = prefill.content(range(3))
        pair.control.error = UnavailableError("cut off")
        pushing.cancel()
        await eventually(lambda: pair.control.count("fail"))
        pushing.cancel()
        with pytest.raises(asyncio.CancelledError):
            await pushing
        assert prefill.sender.counters.undrained == 1
        for block in prefill.pool.allocate(prefill.pool.num_free):
            for layer in range(LAYERS):
                prefill.block(layer, block)[:] = 0
        prefill.backend.let_go()
        sealed = await waiting
        assert decode.content(sealed.block_ids) == computed
        await eventually(lambda: prefill.pool.num_free == 3)  # they go back all the same
        decode.pool.free(decode.receiver.take("t"))


async def test_source_blocks_are_held_beyond_the_drain_timeout_until_the_write_has_ended(make):
    async with make(prefill={"drain_timeout_s": 0.05}).running() as pair:
        pair.prefill.faults.delay[1] = HELD
        pair.prefill.faults.fail_post.add(LAYERS + 1)
        with pytest.raises(TransferFailedError, match="seal"):
            await pair.prefill.run_request("t", pair.target, 40)
        assert pair.prefill.sender.counters.undrained == 1
        assert pair.prefill.pool.num_used == 3
        pair.prefill.backend.let_go()
        await pair.idle()


@pytest.mark.parametrize("transport", ["collective"])
async def test_a_write_that_comes_after_its_lease_is_refused_by_a_two_sided_transport(make):
    """Its receive plan has ended with the lease, so it never lands at all."""
    async with make(decode={"num_blocks": 16, "leases": BRIEF}).running() as pair:
        prefill, decode = pair.prefill, pair.decode
        slot = decode.slots.segment_of(0)
        scratch = dataclasses.replace(prefill.slots.segment_of(0), length=slot.length)
        # The pair's group is made with the first transfer; that must not count as a stall.
        await asyncio.wrap_future(
            prefill.agent.read(decode.descriptor.agent_name, [scratch], [slot])
        )
        prefill.faults.late[1] = HELD
        waiting = asyncio.create_task(decode.receiver.wait_sealed("t", 60))
        pushing = asyncio.create_task(prefill.run_request("t", pair.target, 40))
        with pytest.raises(TransferFailedError):
            await waiting
        prefill.backend.let_go()
        with pytest.raises(TransferFailedError):
            await pushing
        assert not any(decode.block(0, block).any() for block in range(16))
        await pair.idle()


async def test_a_writer_that_comes_back_settles_what_it_owes(make):
    async with make(decode={"leases": LeaseConfig(hold_s=100)}).running() as pair:
        async with pair.prefill.sender.push("t", "t", pair.target, 40):
            pair.control.error = UnavailableError("cut off")
            pair.decode.receiver.peer_gone(pair.prefill.descriptor.instance_id)
            pair.prefill.sender.peer_gone(pair.target)
        assert pair.prefill.sender.unsettled_transfers == 1
        await asyncio.sleep(0.3)
        assert pair.decode.pool.num_quarantined == 3
        pair.control.error = None
        pair.decode.receiver.peer_arrived(pair.prefill.descriptor)
        pair.prefill.sender.peer_arrived(pair.target)
        await pair.idle()


async def test_a_write_that_ran_when_decode_was_lost_may_land_late_and_is_settled_later(make):
    """Over TCP a WRITE to a process that hangs ends here when it is left, and lands there when it
    goes on. Decode keeps the blocks until long after that, also if it has come back meanwhile.
    """
    async with make(prefill={"lost_write_s": 30.0}).running() as pair:
        prefill, decode, now = pair.prefill, pair.decode, [0.0]
        prefill.sender._control.settlements._clock = lambda: now[0]
        prefill.faults.delay[1] = HELD
        gates = {1: threading.Event()}
        push = asyncio.create_task(prefill.run_request("t", pair.target, 40, gates=gates))
        await eventually(lambda: prefill.faults.writes)
        decode.receiver.peer_gone(prefill.descriptor.instance_id)
        prefill.sender.peer_gone(pair.target)
        prefill.backend.let_go()  # the library ends it
        gates[1].set()
        with pytest.raises(UnavailableError, match="was lost"):
            await push
        assert prefill.pool.num_used == 0
        decode.receiver.peer_arrived(prefill.descriptor)
        prefill.sender.peer_arrived(pair.target)
        told = pair.control.count("renew")
        async with prefill.sender.push("next", "next", pair.target, 40):
            await eventually(lambda: pair.control.count("renew") > told + 1)  # ticks have passed
        await eventually(lambda: pair.control.count("settle"))
        assert decode.pool.num_quarantined == 3
        now[0] = 30.0
        await pair.idle()


async def test_a_transfer_whose_write_still_runs_is_not_settled_by_a_call_that_comes_again(make):
    async with make().running() as pair:
        prefill, decode = pair.prefill, pair.decode
        prefill.faults.late[1] = HELD
        pushing = asyncio.create_task(prefill.run_request("t", pair.target, 40))
        await eventually(lambda: prefill.faults.writes)
        pushing.cancel()
        await eventually(lambda: decode.pool.num_quarantined)
        pushing.cancel()
        with pytest.raises(asyncio.CancelledError):
            await pushing
        with pytest.raises(DuplicateRequestError):
            async with prefill.sender.push("again", "t", pair.target, 40):
                pass
        assert [call[-1] for call in pair.control.calls if call[1] == "fail"] == [False]
        assert decode.pool.num_quarantined == 3
        prefill.backend.let_go()
        await pair.idle()
