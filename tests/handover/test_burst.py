"""F06: a burst at a decode worker that is slow. No lease runs out, no renewal is lost silently."""

import asyncio

from epd.handover.lease_config import LeaseConfig

REQUESTS = 128
#: How many a prefill worker computes at a time.
RUNNING = 32
TOKENS = 32
#: Room for a tenth of the requests.
BLOCKS = 26


async def test_f06_a_burst_at_a_slow_decode_worker_loses_no_lease(make):
    leases = LeaseConfig(progress_timeout_s=20.0, peer_share=REQUESTS)
    decode = {
        "num_blocks": BLOCKS,
        "leases": leases,
        "max_waiting": REQUESTS,
        "reserve_timeout_s": 120,
    }
    async with make(decode=decode, prefill={"reserve_timeout_s": 120}).running() as pair:
        receiver = pair.decode.receiver
        slots = asyncio.Semaphore(RUNNING)

        async def prefill(number):
            async with slots:
                await pair.prefill.run_request(f"r{number}", pair.target, TOKENS, token=number)

        async def decoded(number):
            sealed = await receiver.wait_sealed(f"r{number}", 120)
            blocks = receiver.take(f"r{number}")
            await asyncio.sleep(0.2)  # a slow decode worker keeps them
            pair.decode.pool.free(blocks)
            return sealed.first_token

        async with asyncio.TaskGroup() as group:
            answers = [group.create_task(decoded(number)) for number in range(REQUESTS)]
            for number in range(REQUESTS):
                group.create_task(prefill(number))
        assert [answer.result() for answer in answers] == list(range(REQUESTS))
        assert receiver.leases.counters.expired == 0
        assert receiver.leases.counters.unknown_renewals == 0
        await pair.idle()


async def test_f06_a_renewal_of_an_unknown_id_is_answered_counted_and_logged(make, caplog):
    caplog.set_level("INFO")
    async with make().running() as pair:
        assert await pair.control.renew(["nobody's"]) == ["nobody's"]
        assert pair.decode.receiver.leases.counters.unknown_renewals == 1
        assert "nobody's" in caplog.text
        await pair.idle()
