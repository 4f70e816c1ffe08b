"""What the embedding cache of an encoder keeps, shares and drops."""

import asyncio
import itertools
import time

import pytest
import torch

from tests.encoder.calls import Caller
from tests.encoder.conftest import MakeEncoder
from tests.encoder.pictures import encoded, picture
from tests.encoder.watched import ONE, Watched, file, until


async def test_f30_second_time_is_a_hit_and_runs_nothing(
    make_encoder: MakeEncoder, caller: Caller
) -> None:
    encoder = await make_encoder()
    first = await caller.encode(encoder, file(0))
    expected = encoder.embedding(first.handle_ids[0]).clone()
    encoder.release(first.handle_ids, settled=True)
    before = encoder.stats()
    second = await caller.encode(encoder, file(0))
    after = encoder.stats()
    assert (first.hits, second.hits) == ([False], [True])
    assert [stage.name for stage in second.ready[0].stages] == ["plan"]
    assert after.encoded_images == before.encoded_images == 1
    assert (after.cache_queries, after.cache_hits) == (2, 1)
    assert torch.equal(encoder.embedding(second.handle_ids[0]), expected)


async def test_hundred_concurrent_calls_for_one_image_run_the_tower_once(
    make_encoder: MakeEncoder, caller: Caller, watched: Watched
) -> None:
    encoder = await make_encoder(watched)
    answers = await asyncio.gather(*(caller.encode(encoder, file(0)) for _ in range(100)))
    assert watched.calls == [1]
    handles = [answer.planned[0].handle for answer in answers]
    assert len({handle.handle_id for handle in handles}) == 100
    assert len({handle.segment for handle in handles}) == 1
    for answer in answers:
        encoder.release(answer.handle_ids, settled=True)
    assert encoder.stats().in_use_bytes == 0


async def test_stages_follow_each_other_also_in_a_call_that_joins_late(
    make_encoder: MakeEncoder, caller: Caller, watched: Watched
) -> None:
    encoder = await make_encoder(watched)
    watched.gate.clear()
    first = asyncio.create_task(caller.encode(encoder, file(0)))
    await until(lambda: bool(watched.calls))
    joined_ns = time.monotonic_ns()
    second = asyncio.create_task(caller.encode(encoder, file(0)))
    await until(lambda: encoder.stats().cache_queries == 2)
    watched.gate.set()
    all_of_it, the_end = (answer.ready[0].stages for answer in [await first, await second])
    names = ["plan", "queue", "queue", "preprocess", "queue", "encode"]
    assert [stage.name for stage in all_of_it] == names
    assert [stage.name for stage in the_end] == ["plan", "encode"]
    assert the_end[0].start_ns >= joined_ns
    for stages in (all_of_it, the_end):
        for earlier, later in itertools.pairwise(stages):
            assert earlier.end_ns <= later.start_ns <= later.end_ns


async def test_same_image_twice_in_one_call_is_encoded_once(
    make_encoder: MakeEncoder, caller: Caller, watched: Watched
) -> None:
    encoder = await make_encoder(watched)
    answer = await caller.encode(encoder, file(0), file(1), file(0))
    assert sum(watched.calls) == 2
    segments = [planned.handle.segment for planned in answer.planned.values()]
    assert segments[0] == segments[2] != segments[1]
    assert len(set(answer.handle_ids)) == 3


@pytest.mark.parametrize("policy", ["s3fifo", "lru"])
async def test_f28_kept_bytes_never_exceed_the_capacity(
    make_encoder: MakeEncoder, caller: Caller, policy: str
) -> None:
    capacity = 4 * ONE
    encoder = await make_encoder(embedding_cache_bytes=capacity, embedding_policy=policy)
    for seed in range(12):  # 3 C
        answer = await caller.encode(encoder, file(seed))
        assert encoder.stats().used_bytes <= capacity
        encoder.release(answer.handle_ids, settled=True)
        assert encoder.stats().cached_bytes <= capacity
        encoder.check_integrity()
    assert encoder.stats().cached_bytes == capacity
    assert encoder.stats().evictions == 8


async def test_f28_capacity_0_keeps_nothing(make_encoder: MakeEncoder, caller: Caller) -> None:
    encoder = await make_encoder(embedding_cache_bytes=0)
    for _ in range(2):
        answer = await caller.encode(encoder, file(0))
        assert answer.hits == [False]
        encoder.release(answer.handle_ids, settled=True)
        assert encoder.stats().used_bytes == 0


async def test_f28_oversized_embedding_is_served_and_dropped_and_evicts_nothing(
    make_encoder: MakeEncoder, caller: Caller
) -> None:
    encoder = await make_encoder(embedding_cache_bytes=ONE)
    small = await caller.encode(encoder, file(0))
    encoder.release(small.handle_ids, settled=True)
    large = await caller.encode(encoder, encoded(picture(168, 168), "PNG"))
    assert large.planned[0].handle.spec.byte_count > ONE
    assert torch.isfinite(encoder.embedding(large.handle_ids[0])).all()
    encoder.release(large.handle_ids, settled=True)
    assert encoder.stats().cached_bytes == ONE
    assert (await caller.encode(encoder, file(0))).hits == [True]
