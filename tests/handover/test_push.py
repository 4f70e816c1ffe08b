"""A pushed prompt arrives byte by byte, once, and is complete only with its seal."""

import asyncio
import threading

import pytest

from epd.engine.requests import LayerProgress
from epd.errors import EpdError
from epd.handover.lease import LeaseState
from epd.handover.lease_config import LeaseConfig
from epd.handover.push import KvPush
from epd.handover.sender_config import PushTime
from epd.transfer.factory import TRANSPORTS
from tests.handover.sides import GATE_TIMEOUT_S, SEAL_BYTES, SHAPE, eventually


@pytest.fixture(params=TRANSPORTS)
def transport(request):
    return request.param


async def receive(pair, transfer_id, timeout_s=60.0, **options):
    sealed = await pair.decode.receiver.wait_sealed(transfer_id, timeout_s, **options)
    return sealed, pair.decode.receiver.take(transfer_id)


def hold_until_sealed(agent, monkeypatch):
    """Keeps the agent busy until the seal is queued too; returns the event that frees it."""
    free = threading.Event()
    write_seal = KvPush.write_seal

    def seal_then_free(push, *arguments):
        write_seal(push, *arguments)
        free.set()

    monkeypatch.setattr(KvPush, "write_seal", seal_then_free)
    agent._call(lambda backend: free.wait(GATE_TIMEOUT_S))
    return free


@pytest.mark.parametrize("token_count", [1, 16, 17, 100, 128])
async def test_all_bytes_arrive_and_are_counted_once(make, token_count):
    async with make().running() as pair:
        prefill, decode = pair.prefill, pair.decode
        mine = prefill.pool.allocate(prefill.layout.blocks_for(token_count))
        prefill.pool.free(mine)  # run_request gets the same ones again
        receiving = asyncio.create_task(receive(pair, "t"))
        report = await prefill.run_request("t", pair.target, token_count, token=7)
        sealed, blocks = await receiving
        assert (sealed.first_token, sealed.logprob) == (7, -0.5)
        assert decode.content(blocks) == prefill.content(mine)
        kv_bytes = len(blocks) * decode.layout.block_bytes * decode.layout.layer_count
        assert sealed.byte_count == kv_bytes
        assert report.byte_count == kv_bytes + SEAL_BYTES
        assert prefill.agent.counters.writes.byte_count == kv_bytes + SEAL_BYTES
        decode.pool.free(blocks)
        await pair.idle()


async def test_order_of_wait_and_reserve_does_not_matter(make):
    async with make().running() as pair:
        await pair.prefill.run_request("late", pair.target, 40)
        await asyncio.sleep(0.05)
        _, blocks = await receive(pair, "late")
        pair.decode.pool.free(blocks)
        await pair.idle()


async def test_neighbouring_blocks_travel_as_one_descriptor(make):
    async with make().running() as pair:
        report = await pair.prefill.run_request("t", pair.target, 64, chunk=64)
        assert report.descriptor_count == pair.prefill.layout.layer_count + 1
        assert report.write_count == pair.prefill.layout.layer_count + 1
        assert len(report.layer_ns) == pair.prefill.layout.layer_count
        pair.decode.pool.free((await receive(pair, "t"))[1])
        await pair.idle()


async def test_layers_that_wait_for_the_agent_leave_as_one_write_per_step_the_seal_with_them(
    make, monkeypatch
):
    async with make(prefill={"merge_bytes": 1 << 20}).running() as pair:
        prefill, layers = pair.prefill, pair.prefill.layout.layer_count
        mine = prefill.pool.allocate(7)
        prefill.pool.free(mine)
        free = hold_until_sealed(prefill.agent, monkeypatch)
        report = await prefill.run_request("t", pair.target, 100, chunk=64)
        assert free.is_set()
        assert report.write_count == 2
        assert report.byte_count == 7 * layers * prefill.layout.block_bytes + SEAL_BYTES
        assert len(report.layer_ns) == layers
        assert all(report.layer_ns)
        sealed = await pair.decode.receiver.wait_sealed("t", 30)
        assert pair.decode.receiver.leases.get("t").layers == set(range(layers))
        blocks = pair.decode.receiver.take("t")
        assert pair.decode.content(blocks) == prefill.content(mine)
        assert sealed.byte_count == 7 * layers * prefill.layout.block_bytes
        pair.decode.pool.free(blocks)
        await pair.idle()


async def test_no_write_takes_more_layers_than_fit(make, monkeypatch):
    two_layers = 2 * 4 * SHAPE.block_bytes
    async with make(prefill={"merge_bytes": two_layers}).running() as pair:
        hold_until_sealed(pair.prefill.agent, monkeypatch)
        report = await pair.prefill.run_request("t", pair.target, 64)
        assert report.layer_ns[0] == report.layer_ns[1]  # of one WRITE
        assert report.write_count == pair.prefill.layout.layer_count / 2
        pair.decode.pool.free((await receive(pair, "t"))[1])
        await pair.idle()


async def test_a_burst_of_64_requests_loses_nothing(make):
    leases = LeaseConfig(progress_timeout_s=60, settle_grace_s=60, peer_share=1.0)
    decode = {"num_blocks": 160, "leases": leases}
    async with make(decode=decode, prefill={"num_blocks": 128}).running() as pair:

        async def one(number):
            name = f"burst {number}"
            waiting = asyncio.create_task(pair.decode.receiver.wait_sealed(name, 60))
            await pair.prefill.run_request(name, pair.target, 20, token=number)
            sealed = await waiting
            pair.decode.pool.free(pair.decode.receiver.take(name))
            return sealed.first_token

        assert await asyncio.gather(*(one(number) for number in range(64))) == list(range(64))
        assert pair.decode.receiver.leases.counters.failed == 0
        await pair.idle()


async def test_a_push_after_the_forward_pass_writes_nothing_before_its_end(make):
    async with make(prefill={"push_time": PushTime.AFTER}).running() as pair:
        prefill = pair.prefill
        mine = prefill.pool.allocate(7)
        async with prefill.sender.push("t", "t", pair.target, 100) as push:
            await asyncio.to_thread(prefill.compute, "t", mine, 100)
            assert push.writes.kv_writes == 0
            report = await prefill.sender.finish(push, 42, -0.5, 0)
        assert report.hidden_ns == 0
        _, blocks = await receive(pair, "t")
        assert pair.decode.content(blocks) == prefill.content(mine)
        prefill.pool.free(mine)
        pair.decode.pool.free(blocks)
        await pair.idle()


async def test_cached_prefix_of_prefill_is_pushed_with_the_first_step(make):
    """The engine computes from token 32 on only; the two cached blocks arrive all the same."""
    async with make().running() as pair:
        prefill = pair.prefill
        mine = prefill.pool.allocate(5)
        prefill.pool.free(mine)
        prefill.memory.view()[:] = 3
        await prefill.run_request("t", pair.target, 80, cached=32, chunk=16)
        _, blocks = await receive(pair, "t")
        assert pair.decode.content(blocks) == prefill.content(mine)
        pair.decode.pool.free(blocks)
        await pair.idle()


async def test_a_cached_prefix_does_not_wait_for_later_steps(make):
    async with make().running() as pair:
        prefill = pair.prefill
        mine = prefill.pool.allocate(5)
        async with prefill.sender.push("t", "t", pair.target, 80) as push:
            prefill.sender.on_layer(0, [LayerProgress("t", tuple(mine), 32, 48, 80, 32)])
            assert push.writes.kv_bytes == 3 * prefill.layout.block_bytes
        prefill.pool.free(mine)
        await pair.idle()


@pytest.mark.parametrize("first", ["decode", "reserve"])
async def test_blocks_that_decode_holds_are_not_pushed_whichever_call_comes_first(make, first):
    async with make().running() as pair:
        decode, prefill = pair.decode, pair.prefill
        known = decode.pool.allocate(2)
        for block, name in zip(known, (b"a", b"b"), strict=True):
            decode.pool.publish(block, name)
        decode.pool.free(known)
        before = decode.content(known)
        receiving = None
        if first == "decode":
            receiving = asyncio.create_task(receive(pair, "t"))
            await asyncio.sleep(0)
        hashes = [b"a", b"b", b"c"]
        report = await prefill.run_request("t", pair.target, 80, hashes=hashes)
        sealed, blocks = await (receiving or receive(pair, "t"))
        assert sealed.cached_block_count == 2
        assert list(blocks[:2]) == known
        assert decode.content(known) == before
        per_block = decode.layout.block_bytes * decode.layout.layer_count
        assert report.byte_count == 3 * per_block + SEAL_BYTES
        decode.pool.free(blocks)
        await pair.idle()


async def test_ids_are_never_confused_by_prefix(make):
    async with make().running() as pair:
        waiting = asyncio.create_task(receive(pair, "1"))
        await pair.prefill.run_request("11", pair.target, 20, token=11)
        await asyncio.sleep(0.1)
        assert not waiting.done()
        await pair.prefill.run_request("1", pair.target, 20, token=1)
        sealed, blocks = await waiting
        assert sealed.first_token == 1
        pair.decode.pool.free(blocks)
        sealed, blocks = await receive(pair, "11")
        assert sealed.first_token == 11
        pair.decode.pool.free(blocks)
        await pair.idle()


async def test_time_before_the_forward_pass_ended_counts_as_hidden(make):
    async with make().running() as pair:
        report = await pair.prefill.run_request("t", pair.target, 128, chunk=32, pause_s=0.005)
        assert report.hidden_ns > 0
        assert report.exposed_ns > 0
        pair.decode.pool.free((await receive(pair, "t"))[1])
        await pair.idle()


async def test_sealed_is_final_a_late_fail_changes_nothing(make):
    async with make().running() as pair:
        await pair.prefill.run_request("t", pair.target, 20)
        await eventually(lambda: pair.decode.receiver.leases.count(LeaseState.SEALED))
        pair.decode.receiver.fail("t", EpdError("too late"), settled=True)
        _, blocks = await receive(pair, "t")
        pair.decode.pool.free(blocks)
        await pair.idle()


async def test_concurrent_pushes_all_arrive(make):
    async with make().running() as pair:

        async def one(number):
            receiving = asyncio.create_task(receive(pair, f"r{number}"))
            await pair.prefill.run_request(f"r{number}", pair.target, 50, token=number, chunk=20)
            sealed, blocks = await receiving
            assert sealed.first_token == number
            pair.decode.pool.free(blocks)

        await asyncio.gather(*(one(n) for n in range(8)))
        await pair.idle()
