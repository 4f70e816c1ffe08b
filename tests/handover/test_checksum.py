"""With checksums on, KV that did not arrive as it was sent is never used."""

import asyncio

import pytest
from hypothesis import given
from hypothesis import strategies as st

from epd.errors import DataLossError, TransferFailedError
from epd.handover.layer_digests import LayerDigests, differing_layers

CHECKED = {"checksum": True}
LAYERS = 4


async def push(pair, transfer_id, token_count=100, **options):
    """One push, waited for at both sides; the waiter's result or error."""
    wait = pair.decode.receiver.wait_sealed(transfer_id, 60)
    waiting = asyncio.create_task(wait)
    await pair.prefill.run_request(transfer_id, pair.target, token_count, **options)
    return (await asyncio.gather(waiting, return_exceptions=True))[0]


@pytest.mark.parametrize("write", [1, LAYERS, LAYERS + 2, 2 * LAYERS])
async def test_a_corrupted_byte_of_any_layer_and_chunk_is_data_loss_and_no_token(make, write):
    """Two chunks of 64 and 36 tokens: eight WRITEs, then the seal."""
    async with make(decode=CHECKED).running() as pair:
        pair.prefill.faults.corrupt.add(write)
        error = await push(pair, "t")
        assert isinstance(error, DataLossError)
        assert error.reason == "CHECKSUM_MISMATCH"
        assert f"the first is {(write - 1) % LAYERS}" in error.message
        with pytest.raises(DataLossError):  # a repeated call learns the same
            await pair.decode.receiver.wait_sealed("t", 1)
        await pair.idle()
        sealed = await push(pair, "next")
        assert sealed.first_token == 42
        pair.decode.pool.free(pair.decode.receiver.take("next"))
        await pair.idle()


async def test_a_decode_call_that_comes_after_the_seal_is_told_too(make):
    async with make(decode=CHECKED).running() as pair:
        pair.prefill.faults.corrupt.add(2)
        await pair.prefill.run_request("t", pair.target, 40)
        with pytest.raises(DataLossError):
            await pair.decode.receiver.wait_sealed("t", 60)
        await pair.idle()


async def test_damaged_digests_are_no_match(make):
    """The last bytes of the seal's WRITE are the digests; a WRITE of theirs alone is not."""
    async with make(decode=CHECKED).running() as pair:
        receiver = pair.decode.receiver
        async with pair.prefill.sender.push("t", "t", pair.target, 40) as open_push:
            blocks = pair.prefill.pool.allocate(3)
            await asyncio.to_thread(pair.prefill.compute, "t", blocks, 40)
            open_push._digests.update(0, blocks[:1])  # one block more than was pushed
            await pair.prefill.sender.finish(open_push, 7, -0.5, 0)
        with pytest.raises(DataLossError, match="the first is 0"):
            await receiver.wait_sealed("t", 60)
        pair.prefill.pool.free(blocks)
        await pair.idle()


@pytest.mark.parametrize("token_count", [1, 16, 33, 100])
async def test_whole_kv_passes_whatever_its_length_and_chunks(make, token_count):
    async with make(decode=CHECKED).running() as pair:
        for number, chunk in enumerate((7, 16, 64)):
            sealed = await push(pair, f"t{number}", token_count, chunk=chunk)
            assert sealed.first_token == 42
            pair.decode.pool.free(pair.decode.receiver.take(f"t{number}"))
        await pair.idle()


async def test_a_lease_that_ends_while_its_kv_is_checked_gives_no_kv(make):
    """The check hangs until the sealed transfer has expired."""
    async with make(decode=CHECKED).running() as pair:
        checked, expired = asyncio.Event(), asyncio.Event()

        async def hang(lease):
            checked.set()
            await expired.wait()

        pair.decode.receiver._verifier.check = hang
        waiting = asyncio.create_task(pair.decode.receiver.wait_sealed("t", 60))
        await pair.prefill.run_request("t", pair.target, 40)
        await checked.wait()
        pair.decode.be_impatient(progress_timeout_s=0.3)
        await pair.idle()
        expired.set()
        with pytest.raises(TransferFailedError, match="nobody took it"):
            await waiting


async def test_without_checksums_nothing_is_hashed(make):
    async with make().running() as pair:
        pair.prefill.sender._read_block = None  # would fail if it were called
        sealed = await push(pair, "t")
        assert sealed.first_token == 42
        pair.decode.pool.free(pair.decode.receiver.take("t"))
        await pair.idle()


@given(st.binary(min_size=24, max_size=24), st.integers(0, 23), st.integers(1, 255))
def test_any_changed_byte_changes_its_layers_digest_only(memory, position, change):
    """Two layers of three blocks of four bytes."""

    def reader(data):
        return lambda layer, block: data[12 * layer + 4 * block :][:4]

    sent = LayerDigests(2, reader(memory))
    for layer in (1, 0):
        sent.update(layer, [2])
        sent.update(layer, [0, 1])
    damaged = bytearray(memory)
    damaged[position] ^= change
    assert differing_layers(sent.digests(), [2, 0, 1], reader(memory)) == []
    assert differing_layers(sent.digests(), [2, 0, 1], reader(bytes(damaged))) == [position // 12]
