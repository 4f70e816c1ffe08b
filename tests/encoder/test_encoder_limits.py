"""More than an encoder can hold is refused, never waited for."""

import asyncio
import time

import pytest

from epd.errors import (
    InvalidRequestError,
    ResourceExhaustedError,
)
from tests.encoder.calls import Caller
from tests.encoder.conftest import MakeEncoder
from tests.encoder.watched import ONE, Watched, file, memory, until


async def test_f26_all_images_of_a_call_get_memory_or_none(
    make_encoder: MakeEncoder, caller: Caller, watched: Watched
) -> None:
    """N calls of two images, memory for N images: some are refused, none waits for another."""
    n = 6
    watched.gate.clear()  # the first ones hold their memory until another has asked
    encoder = await make_encoder(watched, embedding_cache_bytes=0, embedding_working_bytes=n * ONE)
    idle = memory(encoder.stats())
    pairs = [(file(2 * k), file(2 * k + 1)) for k in range(n)]
    refused: list[ResourceExhaustedError] = []

    async def served(pair: tuple[bytes, bytes]) -> None:
        while True:
            try:
                answer = await caller.encode(encoder, *pair)
            except ResourceExhaustedError as error:
                refused.append(error)
                watched.gate.set()
                await asyncio.sleep(error.retry_after_s)
                continue
            encoder.release(answer.handle_ids, settled=True)
            return

    async with asyncio.timeout(120):
        await asyncio.gather(*(served(pair) for pair in pairs))
    assert refused
    assert {error.reason for error in refused} == {"EMBEDDING_MEMORY"}
    assert memory(encoder.stats()) == idle


async def test_larger_than_all_memory_is_refused_for_good(
    make_encoder: MakeEncoder, caller: Caller
) -> None:
    encoder = await make_encoder(embedding_cache_bytes=0, embedding_working_bytes=4096)
    with pytest.raises(InvalidRequestError, match=f"{ONE} bytes and the encoder has 4096"):
        await caller.encode(encoder, file(0))  # a hint to try again would be a lie


async def test_f33_more_pending_images_than_the_queue_holds_are_refused_with_a_hint(
    make_encoder: MakeEncoder, caller: Caller, watched: Watched
) -> None:
    watched.gate.clear()  # a refusal that waited for the tower would never come
    encoder = await make_encoder(watched, max_pending_images=4)
    calls = [asyncio.create_task(caller.encode(encoder, file(seed))) for seed in range(10)]
    await until(lambda: sum(call.done() for call in calls) == 6)
    watched.gate.set()
    results = await asyncio.gather(*calls, return_exceptions=True)
    refused = [one for one in results if isinstance(one, ResourceExhaustedError)]
    assert len(refused) == 6
    assert {one.reason for one in refused} == {"QUEUE_FULL"}
    assert all(one.retry_after_s > 0 for one in refused)
    assert encoder.stats().open_leases == 4


async def test_f32_two_hundred_calls_at_once_are_served_or_refused_and_the_loop_stays_free(
    make_encoder: MakeEncoder, caller: Caller
) -> None:
    encoder = await make_encoder()
    files = [file(seed) for seed in range(40)]
    longest_block_s = 0.0

    async def pulse() -> None:
        nonlocal longest_block_s
        while True:
            before = time.thread_time()  # what this thread computes, however busy the machine is
            await asyncio.sleep(0.005)
            longest_block_s = max(longest_block_s, time.thread_time() - before)

    heart = asyncio.create_task(pulse())
    results = await asyncio.gather(
        *(caller.encode(encoder, files[k % 40]) for k in range(200)), return_exceptions=True
    )
    heart.cancel()
    failed = [one for one in results if isinstance(one, BaseException)]
    assert all(isinstance(one, ResourceExhaustedError) for one in failed), failed
    assert len(results) == 200
    assert longest_block_s < 1  # the calls all come in one turn of the loop here
