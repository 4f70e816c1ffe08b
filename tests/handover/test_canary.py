"""F11: blocks of a cancelled transfer hold what the next request wrote, whatever comes late."""

import asyncio

import pytest

from epd.errors import TransferFailedError
from epd.handover.lease_config import LeaseConfig
from tests.handover.sides import eventually
from tests.transfer.held import HELD

BLOCKS = 5
TOKENS = 80


async def pushed(pair, transfer_id):
    """A whole push; its source as it was sent, and decode's copy."""
    prefill, decode = pair.prefill, pair.decode
    mine = prefill.pool.allocate(BLOCKS)
    async with prefill.sender.push(transfer_id, transfer_id, pair.target, TOKENS) as push:
        await asyncio.to_thread(prefill.compute, transfer_id, mine, TOKENS)
        await prefill.sender.finish(push, 1, -0.5, 0)
    sent = prefill.content(mine)
    prefill.pool.free(mine)
    await decode.receiver.wait_sealed(transfer_id, 60)
    blocks = decode.receiver.take(transfer_id)
    return sent, blocks


async def test_f11_a_write_that_lands_late_never_spoils_the_next_request(make, full_run):
    """Decode has just the blocks of one request: the next one needs exactly those."""
    # The cap of a peer is no matter here: it counts what is in quarantine.
    leases = LeaseConfig(progress_timeout_s=60, peer_share=2.0)
    decode = {"num_blocks": BLOCKS, "leases": leases, "reserve_timeout_s": 60}
    async with make(decode=decode, prefill={"reserve_timeout_s": 60}).running() as pair:
        faults, receiver = pair.prefill.faults, pair.decode.receiver
        for number in range(100 if full_run else 5):
            before = faults.writes
            faults.late[before + 1] = HELD
            first = asyncio.create_task(pair.prefill.run_request(f"a{number}", pair.target, TOKENS))
            await eventually(lambda before=before: faults.writes > before)
            failed = pair.prefill.sender.counters.failed
            receiver.cancel(f"a{number}")
            assert pair.decode.pool.num_quarantined == BLOCKS
            second = asyncio.create_task(pushed(pair, f"b{number}"))
            await eventually(lambda: receiver.waiting_reservations)
            # The first one's layers and seal are out, and prefill has heard that nobody wants them.
            await eventually(lambda failed=failed: pair.prefill.sender.counters.failed > failed)
            pair.prefill.backend.let_go()
            with pytest.raises(TransferFailedError):
                await first
            sent, blocks = await second
            assert pair.decode.content(blocks) == sent, f"round {number}"
            pair.decode.pool.free(blocks)
            await pair.idle()
