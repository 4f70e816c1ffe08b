"""Many transfers at once: nothing is confused, nothing leaks, nothing grows."""

import asyncio
import random

from epd.errors import EpdError
from epd.handover.lease_config import LeaseConfig


async def test_first_token_is_never_another_requests(make):
    """F07: 200 overlapping transfers, a third of them cancelled at either side at random times."""
    chance = random.Random(3)
    leases = LeaseConfig(progress_timeout_s=60, settle_grace_s=60, peer_share=1.0)
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
                wait = asyncio.create_task(pair.decode.receiver.wait_sealed(transfer_id, 60))
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
