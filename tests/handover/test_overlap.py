"""Many transfers at once: nothing is confused, nothing leaks, nothing grows."""

import asyncio
import random
import resource

from epd.errors import EpdError
from epd.handover.lease_config import LeaseConfig
from tests.handover.sides import make_pair


async def test_first_token_is_never_another_requests(make):
    """F07: 200 overlapping transfers, a third of them cancelled at either side at random times."""
    chance = random.Random(3)
    leases = LeaseConfig(peer_share=1.0)
    async with make(decode={"num_blocks": 256, "leases": leases}).running() as pair:
        slots = asyncio.Semaphore(10)
        outcomes = []

        async def one(number):
            transfer_id = str(number)  # 1 and 11, 2 and 21 ...: prefixes of each other
            async with slots:
                push = asyncio.create_task(
                    pair.prefill.run_request(
                        transfer_id, pair.target, chance.randrange(1, 60), token=number, chunk=20
                    )
                )
                wait = asyncio.create_task(pair.decode.receiver.wait_sealed(transfer_id, 30))
                doomed = chance.choice([push, wait, None, None])
                if doomed is not None:
                    asyncio.get_running_loop().call_later(chance.uniform(0, 0.05), doomed.cancel)
                done = await asyncio.gather(push, wait, return_exceptions=True)
                for result in done:
                    if isinstance(result, Exception) and not isinstance(result, EpdError):
                        raise result
                sealed = done[1]
                if isinstance(sealed, BaseException):
                    pair.decode.receiver.cancel(transfer_id)
                    outcomes.append(False)
                    return
                blocks = pair.decode.receiver.take(transfer_id)
                assert sealed.first_token == number
                pair.decode.pool.free(blocks)
                outcomes.append(True)

        await asyncio.gather(*(one(number) for number in range(200)))
        assert sum(outcomes) > 40
        assert len(outcomes) == 200
        await pair.idle()


async def test_ten_thousand_orphan_reservations_end_and_memory_stays_flat(fabric):
    """F09. Each is followed by nothing; its writer lives and settles when it hears of the end."""
    leases = LeaseConfig(progress_timeout_s=0.02, tombstone_s=0.5, peer_share=1.0)
    decode = {"leases": leases, "expire_every_s": 0.01}
    async with make_pair("local", fabric, decode=decode).running() as pair:

        async def batch(number):
            ids = [f"orphan {number} {n}" for n in range(50)]
            for transfer_id in ids:
                await pair.control.reserve(transfer_id, 16)
            while len(await pair.control.renew(ids[:1])) == 0:
                await asyncio.sleep(0.03)  # a renewal is progress: stop renewing for a while
            await asyncio.sleep(0.01)
            await pair.control.settle(ids)
            pair.control.calls.clear()

        for number in range(40):
            await batch(number)
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        for number in range(40, 200):
            await batch(number)
        after = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        assert pair.decode.receiver.leases.counters.granted == 10_000
        assert after < before * 1.05
        await pair.idle()
