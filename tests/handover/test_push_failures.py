"""Whatever goes wrong with a push is told, not waited for; no block is lost or reused early."""

import asyncio
import dataclasses
import threading
import time

import pytest

from epd.errors import (
    DuplicateRequestError,
    EpdError,
    InternalError,
    NotFoundError,
    RequestCancelledError,
    TransferFailedError,
    UnavailableError,
)
from epd.handover.lease import LeaseState
from epd.handover.lease_config import LeaseConfig
from epd.transfer.transfer_loop import AgentConfig
from tests.handover.sides import DirectControl, eventually
from tests.transfer.held import HELD

LAYERS = 4
#: For tests that wait until a lease has run out. In all others that would take a minute.
BRIEF = LeaseConfig(progress_timeout_s=1.0, settle_grace_s=0.3, hold_s=0.5)


class HungControl(DirectControl):
    """A decode worker that takes renewals and does not answer them."""

    def __init__(self, receiver, sender_instance_id):
        super().__init__(receiver, sender_instance_id)
        self.goes_on = asyncio.Event()

    async def renew(self, transfer_ids):
        self._note("renew", *transfer_ids)
        await self.goes_on.wait()
        return []


@pytest.mark.parametrize("kind", ["fail_post", "fail_running"])
@pytest.mark.parametrize("write", [1, 3, LAYERS + 1])
async def test_failed_write_is_told_within_a_second_with_hop_and_layer(make, kind, write):
    """F01. The fifth WRITE of four layers in one chunk is the seal."""
    async with make().running() as pair:
        getattr(pair.prefill.faults, kind).add(write)
        waiting = asyncio.create_task(pair.decode.receiver.wait_sealed("t", 30))
        where = "seal" if write > LAYERS else f"layer {write - 1}"
        with pytest.raises(TransferFailedError, match=f"prefill to decode, {where}"):
            await pair.prefill.run_request("t", pair.target, 40)
        with pytest.raises(TransferFailedError, match=where):
            await waiting
        await pair.idle()
        await pair.prefill.run_request("next", pair.target, 40)
        await pair.decode.receiver.wait_sealed("next", 60)
        pair.decode.pool.free(pair.decode.receiver.take("next"))
        await pair.idle()


async def test_failure_while_writes_run_is_unsettled_first_and_settled_after(make):
    """Decode's blocks wait in quarantine for the WRITE that is still running."""
    async with make().running() as pair:
        pair.prefill.faults.delay[1] = HELD
        pair.prefill.faults.fail_post.add(2)
        push = asyncio.create_task(pair.prefill.run_request("t", pair.target, 40))
        await eventually(lambda: pair.control.count("fail"))
        pair.prefill.backend.let_go()
        with pytest.raises(TransferFailedError):
            await push
        await pair.idle()
        (told,) = [call for call in pair.control.calls if call[1] == "fail"]
        (settled,) = [call for call in pair.control.calls if call[1] == "settle"]
        assert told[4] is False
        assert settled[0] > told[0]
        await pair.idle()


@pytest.mark.parametrize("reason", [InternalError("out of luck"), RequestCancelledError("gone")])
async def test_prefill_giving_up_is_told_at_once_with_its_reason(make, reason):
    """F02."""
    async with make().running() as pair:
        waiting = asyncio.create_task(pair.decode.receiver.wait_sealed("t", 30))
        with pytest.raises(type(reason)):
            async with pair.prefill.sender.push("t", "t", pair.target, 40):
                raise reason
        with pytest.raises(type(reason), match=reason.message):
            await waiting
        await pair.idle()


async def test_first_token_ending_the_request_releases_the_reservation(make):
    async with make().running() as pair:
        async with pair.prefill.sender.push("t", "t", pair.target, 40):
            assert pair.decode.pool.num_used == 3
        await pair.idle()


@pytest.mark.parametrize("stage", ["reserved", "pushing", "finishing"])
async def test_cancel_at_prefill_at_each_stage(make, stage):
    """F10, F12."""
    async with make().running() as pair:
        prefill = pair.prefill
        if stage == "finishing":
            prefill.faults.delay[5] = 0.3
        mine = prefill.pool.allocate(3)
        inside = asyncio.Event()

        async def request():
            async with prefill.sender.push("t", "t", pair.target, 40) as push:
                if stage != "reserved":
                    layers = 2 if stage == "pushing" else None
                    await asyncio.to_thread(prefill.compute, "t", mine, 40, layers=layers)
                inside.set()
                if stage == "finishing":
                    await prefill.sender.finish(push, 1, 0.0, 0)
                await asyncio.sleep(60)

        task = asyncio.create_task(request())
        await inside.wait()
        await asyncio.sleep(0.02)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        prefill.pool.free(mine)
        if stage == "finishing":  # everything may have arrived before the cancel
            pair.decode.receiver.cancel("t")
        await pair.idle()


@pytest.mark.parametrize("stage", ["before reserve", "reserved", "receiving", "sealed"])
async def test_cancel_at_decode_at_each_stage(make, stage):
    """F10, F15."""
    async with make().running() as pair:
        receiver = pair.decode.receiver
        if stage == "before reserve":
            receiver.cancel("t")
            with pytest.raises(RequestCancelledError):
                await pair.prefill.run_request("t", pair.target, 40)
            assert receiver.leases.counters.refused_late == 1
        elif stage == "sealed":
            await pair.prefill.run_request("t", pair.target, 40)
            await eventually(lambda: receiver.leases.count(LeaseState.SEALED))
            receiver.cancel("t")
            with pytest.raises(NotFoundError):
                receiver.take("t")
        else:
            gate = threading.Event()
            gates = {{"reserved": 0, "receiving": 2}[stage]: gate}
            push = asyncio.create_task(pair.prefill.run_request("t", pair.target, 40, gates=gates))
            state = LeaseState.RECEIVING if stage == "receiving" else LeaseState.RESERVED
            await eventually(lambda: receiver.leases.count(state))
            receiver.cancel("t")
            told = pair.control.count("renew")
            await eventually(lambda: pair.control.count("renew") > told)
            gate.set()
            with pytest.raises(TransferFailedError, match="given up"):
                await push
        await pair.idle()


async def test_waiter_that_goes_away_cancels_the_transfer(make):
    async with make().running() as pair:
        waiting = asyncio.create_task(pair.decode.receiver.wait_sealed("t", 30))
        await asyncio.sleep(0.01)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        with pytest.raises(RequestCancelledError):
            await pair.control.reserve("t", 40)
        await pair.idle()


async def test_a_lost_notice_ends_the_request_and_names_what_arrived(make):
    """F03. Prefill has finished, so decode need not sit out the whole progress timeout."""
    async with make().running() as pair:
        pair.prefill.faults.drop_notice.add(3)
        waiting = asyncio.create_task(pair.decode.receiver.wait_sealed("t", 30))
        await pair.prefill.run_request("t", pair.target, 40)
        lease = pair.decode.receiver.leases.get("t")
        await eventually(lambda: lease.record is not None and len(lease.arrived) == LAYERS - 1)
        pair.decode.be_impatient(settle_grace_s=0.3)
        with pytest.raises(
            TransferFailedError,
            match=r"prefill to decode made no progress .* 3 of 4 layers, 3 WRITEs .*expected: 4",
        ):
            await waiting
        assert pair.decode.receiver.leases.counters.expired == 1
        await pair.idle()


async def test_a_silent_prefill_runs_into_the_progress_timeout(make):
    sides = {"decode": {"leases": BRIEF}, "prefill": {"renew_interval_s": 100}}
    async with make(**sides).running() as pair:
        waiting = asyncio.create_task(pair.decode.receiver.wait_sealed("t", 60))
        started = time.monotonic()
        async with pair.prefill.sender.push("t", "t", pair.target, 40):
            with pytest.raises(TransferFailedError, match=r"no progress for 1\.0 s: 0 of 4 layers"):
                await waiting
            assert time.monotonic() - started > 0.9
            assert pair.decode.pool.num_quarantined == 3
        await pair.idle()


async def test_renewals_keep_a_long_prefill_alive(make):
    """F39: twice the progress timeout without a WRITE."""
    gates = {1: threading.Event()}
    async with make().running() as pair:
        leases, now_ns = pair.decode.receiver.leases, 0
        leases._clock_ns = lambda: now_ns  # stands still while this machine does
        waiting = asyncio.create_task(pair.decode.receiver.wait_sealed("t", 60))
        push = asyncio.create_task(pair.prefill.run_request("t", pair.target, 40, gates=gates))
        await eventually(lambda: leases.count(LeaseState.RECEIVING))
        for _ in range(4):
            now_ns += int(0.6e9 * pair.decode.receiver.config.leases.progress_timeout_s)
            told = pair.control.count("renew")
            await eventually(lambda told=told: pair.control.count("renew") > told)
            await asyncio.sleep(2 * pair.decode.receiver.config.expire_every_s)
        gates[1].set()
        await push
        await waiting
        pair.decode.pool.free(pair.decode.receiver.take("t"))
        assert pair.decode.receiver.leases.counters.expired == 0
        await pair.idle()


async def test_a_decode_worker_that_hangs_holds_up_no_renewal_and_no_settle_of_another(make):
    async with make(
        prefill={"renew_interval_s": 0.01, "control_timeout_s": 3600}
    ).running() as pair:
        sender = pair.prefill.sender
        hung = HungControl(pair.decode.receiver, pair.prefill.descriptor.instance_id)
        other = dataclasses.replace(pair.decode.descriptor, instance_id="other")
        target = dataclasses.replace(pair.target, agent=other, control=hung)
        async with sender.push("h", "h", target, 40), sender.push("t", "t", pair.target, 40):
            await eventually(lambda: hung.count("renew"))
            await pair.prefill.run_request("done", pair.target, 40)
            told = pair.control.count("renew")
            await eventually(lambda: pair.control.count("renew") > told + 2)
            await eventually(lambda: pair.control.count("settle"))
            assert hung.count("renew") == 1
        hung.goes_on.set()
        pair.decode.receiver.cancel("done")
        await pair.idle()


async def test_writer_that_could_not_renew_posts_nothing_more(make):
    """A process that was stopped for long finds its lease lapsed before it writes."""
    leases = LeaseConfig(progress_timeout_s=0.2, hold_s=0.3)
    sender = {"renew_interval_s": 100}
    async with make(decode={"leases": leases}, prefill=sender).running() as pair:
        with pytest.raises(TransferFailedError, match="layer 0: lease not renewed"):
            await pair.prefill.run_request("t", pair.target, 40, pause_s=0.4)
        assert pair.prefill.faults.writes == 0
        await pair.idle()


async def test_a_write_that_hangs_is_given_up_after_the_progress_timeout(make):
    sides = {"decode": {"leases": LeaseConfig(progress_timeout_s=3.0)}}
    async with make(**sides, prefill={"drain_timeout_s": 60}).running() as pair:
        pair.decode.be_impatient(progress_timeout_s=60)  # it is prefill that notices
        pair.prefill.faults.delay[1] = HELD
        push = asyncio.create_task(pair.prefill.run_request("t", pair.target, 40))
        await eventually(lambda: pair.control.count("fail"))
        await asyncio.sleep(0.2)
        assert not push.done()  # the source memory is kept until it has ended
        assert pair.prefill.pool.num_used
        pair.prefill.backend.let_go()
        with pytest.raises(TransferFailedError, match="no WRITE ended"):
            await push
        pair.decode.be_impatient(progress_timeout_s=0.3)  # all has arrived, and nobody takes it
        await pair.idle()


async def test_lost_writer_means_quarantine_until_the_hold_time_then_free(make):
    """F18, seen by decode: the pair stream has ended."""
    async with make().running() as pair:
        waiting = asyncio.create_task(pair.decode.receiver.wait_sealed("t", 30))
        push = pair.prefill.sender.push("t", "t", pair.target, 40)
        await push.__aenter__()
        pair.control.error = UnavailableError("cut off")
        lost = time.monotonic()
        pair.decode.receiver.peer_gone(pair.prefill.descriptor.instance_id)
        assert pair.decode.pool.num_quarantined == 3
        with pytest.raises(UnavailableError, match="was lost"):
            await waiting
        await eventually(lambda: pair.decode.pool.num_quarantined == 0)
        assert time.monotonic() - lost > 0.8  # of the 1 s that a vanished writer is feared
        pair.decode.check()
        await push.__aexit__(None, None, None)


async def test_lost_decode_fails_its_pushes_at_once(make):
    async with make().running() as pair:
        gates = {2: threading.Event()}
        push = asyncio.create_task(pair.prefill.run_request("t", pair.target, 40, gates=gates))
        await eventually(lambda: pair.prefill.faults.writes)
        pair.prefill.sender.peer_gone(pair.target)
        gates[2].set()
        with pytest.raises(UnavailableError, match="was lost"):
            await push
        assert not [call for call in pair.control.calls if call[1] == "fail"]
        pair.prefill.sender.peer_arrived(pair.target)
        pair.decode.be_impatient(settle_grace_s=0.3)  # it is told that nothing more comes
        await pair.idle()


async def test_an_unreachable_decode_gets_its_settle_later(make):
    async with make().running() as pair:
        async with pair.prefill.sender.push("t", "t", pair.target, 40):
            pair.control.error = UnavailableError("busy")
        assert pair.decode.pool.num_used == 3
        pair.control.error = None
        pair.decode.be_impatient(settle_grace_s=0.3)
        await pair.idle()


async def test_a_settle_under_way_is_not_repeated_by_the_tick(make):
    sender = {"renew_interval_s": 0.02, "control_timeout_s": 60}
    async with make(prefill=sender).running() as pair:
        pair.control.settle_gate = asyncio.Event()
        async with pair.prefill.sender.push("t", "t", pair.target, 40):
            pass
        await eventually(lambda: pair.control.count("settle"))
        await asyncio.sleep(0.2)  # ten ticks
        pair.control.settle_gate.set()
        await pair.idle()
        assert pair.control.count("settle") == 1


async def test_damaged_seal_is_data_loss_and_no_token(make):
    async with make().running() as pair:
        pair.prefill.faults.corrupt.add(LAYERS + 1)
        waiting = asyncio.create_task(pair.decode.receiver.wait_sealed("t", 30))
        await pair.prefill.run_request("t", pair.target, 40)
        with pytest.raises(EpdError, match="damaged") as caught:
            await waiting
        assert caught.value.code == "DATA_LOSS"
        await pair.idle()


async def test_malformed_and_foreign_notices_are_counted_and_harmless(make):
    async with make().running() as pair:
        receiver = pair.decode.receiver
        spare = pair.prefill.slots.segment_of(0)
        here = dataclasses.replace(pair.decode.slots.segment, length=spare.length)
        for message in (b"rubbish", b"epd1", b"\xff" * 200):
            await asyncio.wrap_future(
                pair.prefill.agent.write(
                    pair.decode.descriptor.agent_name, [spare], [here], message
                )
            )
        await eventually(lambda: receiver.arrivals.counters.malformed == 3)
        await pair.prefill.run_request("t", pair.target, 40)
        await receiver.wait_sealed("t", 60)
        pair.decode.pool.free(receiver.take("t"))
        await pair.idle()


async def test_closing_gives_open_pushes_up_and_tells_decode(make):
    """F20."""
    async with make().running() as pair:
        push = asyncio.create_task(pair.prefill.run_request("t", pair.target, 40, pause_s=0.3))
        await eventually(lambda: pair.prefill.faults.writes)
        await pair.prefill.sender.close(10)
        assert [call for call in pair.control.calls if call[1] == "fail"]
        with pytest.raises(UnavailableError, match="shutting down"):
            await push
        await pair.idle()


async def test_unpaired_senders_are_refused(make):
    async with make().running() as pair:
        with pytest.raises(NotFoundError, match="not paired"):
            await pair.decode.receiver.reserve("t", "stranger", 16)


async def test_one_open_push_per_request(make):
    async with make().running() as pair:
        async with pair.prefill.sender.push("r", "t", pair.target, 40):
            with pytest.raises(DuplicateRequestError):
                async with pair.prefill.sender.push("r", "t2", pair.target, 40):
                    pass
        await pair.idle()


async def test_death_of_the_agent_thread_fails_every_open_push(make):
    async with make(prefill={"drain_timeout_s": 0.2}).running() as pair:
        deaths: list[BaseException] = []
        pair.prefill.agent.on_death(deaths.append)
        gates = {2: threading.Event()}
        push = asyncio.create_task(pair.prefill.run_request("t", pair.target, 40, gates=gates))
        await eventually(lambda: pair.prefill.faults.writes)
        pair.prefill.faults.die = RuntimeError("segfault, nearly")
        await eventually(lambda: not pair.prefill.agent.alive)
        gates[2].set()
        with pytest.raises(TransferFailedError, match="transfer agent died"):
            await push
        assert not pair.prefill.agent.alive
        await eventually(lambda: deaths)
        # Whether a WRITE was running is not known any more; with its process gone it is not.
        pair.decode.receiver.peer_gone(pair.prefill.descriptor.instance_id)
        await eventually(lambda: pair.decode.pool.num_free == pair.decode.pool.num_blocks)
        pair.decode.check()


async def test_agent_stop_fails_what_is_open(make):
    async with make(prefill={"agent_config": AgentConfig(poll_s=0.001)}).running() as pair:
        pair.prefill.faults.delay[1] = 1.0
        push = asyncio.create_task(pair.prefill.run_request("t", pair.target, 40, pause_s=0.1))
        await eventually(lambda: pair.prefill.faults.writes)
        await asyncio.to_thread(pair.prefill.agent.stop)
        with pytest.raises(TransferFailedError):
            await push
        await pair.idle()
