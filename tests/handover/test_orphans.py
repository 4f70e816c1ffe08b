"""What never gets its counterpart ends by itself and leaves nothing, however often it happens."""

import asyncio
import contextlib

import psutil
import pytest

from epd.errors import EpdError, TransferFailedError, UnavailableError
from epd.handover.lease import LeaseState
from epd.handover.lease_config import LeaseConfig
from tests.handover.sides import eventually, make_pair

QUICK = {"progress_timeout_s": 0.4, "settle_grace_s": 0.2}


@contextlib.asynccontextmanager
async def written_but_not_sealed(pair):
    """A push whose layers are all there; neither seal nor Renew nor Fail comes any more."""
    async with pair.prefill.sender.push("t", "t", pair.target, 40) as push:
        blocks = pair.prefill.pool.allocate(3)
        await asyncio.to_thread(pair.prefill.compute, "t", blocks, 40)
        await push.writes.drained()
        lease = pair.decode.receiver.leases.get("t")
        await eventually(lambda: len(lease.layers) == pair.decode.layout.layer_count)
        try:
            yield
        finally:
            pair.prefill.pool.free(blocks)


async def test_reserved_and_never_written(make):
    async with make(prefill={"renew_interval_s": 100}).running() as pair:
        waiting = asyncio.create_task(pair.decode.receiver.wait_sealed("t", 60))
        pair.decode.be_impatient(**QUICK)
        await pair.control.reserve("t", 40)
        with pytest.raises(TransferFailedError, match="0 of 4 layers") as caught:
            await waiting
        assert caught.value.reason == "TRANSFER_STALLED"
        assert pair.decode.pool.num_quarantined == 3, "its writer lives and may still come"
        await pair.control.settle(["t"])
        await pair.idle()


async def test_reserved_while_the_answer_and_the_word_that_it_was_given_up_are_lost(make):
    """As when decode hangs for a moment: nobody has a push that could be settled."""
    async with make().running() as pair:
        pair.decode.be_impatient(**QUICK)
        reserve = pair.control.reserve

        async def unanswered(*arguments):
            await reserve(*arguments)
            raise UnavailableError("the stream has ended")

        async def lost(*_):
            raise UnavailableError("no answer in time")

        pair.control.reserve, pair.control.fail = unanswered, lost
        with pytest.raises(UnavailableError):
            async with pair.prefill.sender.push("t", "t", pair.target, 40):
                pass
        assert pair.decode.receiver.leases.counters.granted == 1
        await pair.idle()


async def test_a_reserve_still_waits_when_its_writer_is_through(make):
    async with make(decode={"reserve_timeout_s": 120}).running() as pair:
        taken = pair.decode.pool.allocate(pair.decode.pool.num_blocks)
        waiting = asyncio.create_task(pair.control.reserve("t", 40))
        await eventually(lambda: pair.decode.receiver.waiting_reservations == 1)
        decoding = asyncio.create_task(pair.decode.receiver.wait_sealed("t", 60))
        await asyncio.sleep(0)
        await pair.control.settle(["t"])
        for one in (waiting, decoding):
            with pytest.raises(TransferFailedError, match="is through with"):
                await one
        pair.decode.pool.free(taken)
        with pytest.raises(TransferFailedError, match="is through with"):
            await pair.control.reserve("t", 40)
        await pair.idle()


async def test_written_and_never_sealed(make):
    async with make(prefill={"renew_interval_s": 100}).running() as pair:
        waiting = asyncio.create_task(pair.decode.receiver.wait_sealed("t", 60))
        async with written_but_not_sealed(pair):
            pair.decode.be_impatient(**QUICK)
            with pytest.raises(TransferFailedError, match="4 of 4 layers") as caught:
                await waiting
            assert "no seal" in caught.value.message
        await pair.control.settle(["t"])  # what the next tick of the sender would tell
        await eventually(lambda: pair.decode.pool.num_free == pair.decode.pool.num_blocks)
        pair.decode.check()


async def test_sealed_and_never_claimed(make):
    async with make().running() as pair:
        await pair.prefill.run_request("t", pair.target, 40)
        await eventually(lambda: pair.decode.receiver.leases.count(LeaseState.SEALED))
        pair.decode.be_impatient(**QUICK)
        await eventually(lambda: pair.decode.receiver.leases.ended("t"))
        assert pair.decode.receiver.leases.ended("t").reason == "TRANSFER_UNCLAIMED"
        await pair.idle()
        with pytest.raises(TransferFailedError, match="nobody took it"):
            await pair.decode.receiver.wait_sealed("t", 5)


async def test_decode_without_a_reserve(make):
    async with make().running() as pair:
        with pytest.raises(TransferFailedError, match="prefill never reserved"):
            await pair.decode.receiver.wait_sealed("t", 0.2)
        with pytest.raises(TransferFailedError, match="never reserved"):
            await pair.control.reserve("t", 40)  # too late: nobody waits for it any more
        await pair.idle()


async def test_a_writer_that_dies_between_its_layers_and_its_seal(make):
    async with make(prefill={"renew_interval_s": 100}).running() as pair:
        waiting = asyncio.create_task(pair.decode.receiver.wait_sealed("t", 60))
        async with written_but_not_sealed(pair):
            pair.decode.receiver.peer_gone(pair.prefill.descriptor.instance_id)
            assert pair.decode.pool.num_quarantined == 3
            with pytest.raises(EpdError, match="was lost"):
                await waiting
            await eventually(lambda: pair.decode.pool.num_free == pair.decode.pool.num_blocks)
        pair.decode.check()


async def test_orphan_reservations_in_their_thousands_end_and_memory_stays_flat(fabric, full_run):
    """F09: 100 000 in a full run. The writer lives and settles when it hears of the end."""
    batches = 2000 if full_run else 100
    leases = LeaseConfig(
        progress_timeout_s=0.02, tombstone_s=0.5, max_tombstones=2048, peer_share=1.0
    )
    decode = {"leases": leases, "expire_every_s": 0.01}
    async with make_pair("local", fabric, decode=decode).running() as pair:
        receiver = pair.decode.receiver

        async def batch(number):
            ids = [f"orphan {number} {n}" for n in range(50)]
            for transfer_id in ids:
                await pair.control.reserve(transfer_id, 16)
            # Counted: what is remembered of each may be forgotten before anybody looks.
            ended = receiver.leases.counters
            await eventually(lambda: ended.expired == 50 * (number + 1))
            assert await pair.control.renew(ids[:1]) == ids[:1]
            await pair.control.settle(ids)
            pair.control.calls.clear()

        process = psutil.Process()
        warm = batches // 5
        for number in range(warm):
            await batch(number)
        before = process.memory_info().rss
        for number in range(warm, batches):
            await batch(number)
        after = process.memory_info().rss
        assert receiver.leases.counters.granted == 50 * batches
        assert receiver.leases.counters.expired == 50 * batches
        assert after < before * 1.05, f"{before} bytes after a fifth of them, {after} at the end"
        await pair.idle()
