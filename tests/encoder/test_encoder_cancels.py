"""Calls that nobody waits for any more."""

import asyncio
from contextlib import aclosing

from tests.encoder.calls import Caller
from tests.encoder.conftest import MakeEncoder
from tests.encoder.watched import ONE, Watched, file, memory, until


async def test_cancel_of_one_waiter_leaves_the_others_and_of_the_last_stops_the_work(
    make_encoder: MakeEncoder, caller: Caller, watched: Watched
) -> None:
    watched.gate.clear()
    encoder = await make_encoder(watched)
    idle = memory(encoder.stats())
    calls = [asyncio.create_task(caller.encode(encoder, file(0))) for _ in range(3)]
    await until(lambda: encoder.stats().open_leases == 3)
    calls[0].cancel()  # the one that began the work
    await asyncio.gather(calls[0], return_exceptions=True)
    assert encoder.stats().open_leases == 2
    calls[1].cancel()
    watched.gate.set()
    answer = await calls[2]
    encoder.release(answer.handle_ids, settled=True)

    watched.gate.clear()
    blocker = asyncio.create_task(caller.encode(encoder, file(2)))  # keeps the tower busy
    await until(lambda: len(watched.calls) == 2)
    last = asyncio.create_task(caller.encode(encoder, file(1)))
    await until(lambda: encoder.stats().open_leases == 2)
    last.cancel()
    await asyncio.gather(last, return_exceptions=True)
    watched.gate.set()
    encoder.release((await blocker).handle_ids, settled=True)
    await until(lambda: memory(encoder.stats()) == idle)
    assert encoder.stats().open_leases == 0
    assert encoder.stats().encoded_images == 2  # not the one that nobody waits for


async def test_cancel_during_the_forward_keeps_the_memory_until_the_tower_is_through(
    make_encoder: MakeEncoder, caller: Caller, watched: Watched
) -> None:
    watched.gate.clear()
    encoder = await make_encoder(watched)
    call = asyncio.create_task(caller.encode(encoder, file(0)))
    await until(lambda: bool(watched.calls))
    call.cancel()
    await asyncio.gather(call, return_exceptions=True)
    assert encoder.stats().in_use_bytes == ONE  # the tower still writes there
    # The same image again must not find the abandoned work.
    again = asyncio.create_task(caller.encode(encoder, file(0)))
    await until(lambda: encoder.stats().in_use_bytes == 2 * ONE)
    watched.gate.set()
    assert (await again).hits == [False]
    await until(lambda: encoder.stats().in_use_bytes == ONE)


async def test_an_abandoned_call_frees_its_memory(
    make_encoder: MakeEncoder, caller: Caller, watched: Watched
) -> None:
    encoder = await make_encoder(watched, embedding_cache_bytes=0, max_batch=1)
    async with aclosing(encoder.encode(caller.images([file(0), file(1)]))) as events:
        for _ in range(3):  # two plans and the first ready
            await anext(events)
    assert encoder.stats().quarantined_bytes == 0
    await until(lambda: encoder.stats().in_use_bytes == 0)
