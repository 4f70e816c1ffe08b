"""The whole way of an image inside one process: real model, real worker process, real memory."""

import asyncio
import time
from collections.abc import Sequence
from contextlib import aclosing
from pathlib import Path

import pytest
import torch
from transformers import AutoImageProcessor, Qwen2VLForConditionalGeneration

from epd.encoding.encode_events import ImageInput, ImagePlanned
from epd.encoding.encoder import Encoder
from epd.encoding.encoder_stats import EncoderStats
from epd.engine.families.base import PixelInput
from epd.engine.vision_runner import VisionRunner
from epd.errors import (
    DeadlineExceededError,
    InternalError,
    InvalidRequestError,
    NotFoundError,
    ResourceExhaustedError,
    UnavailableError,
)
from tests.encoder.calls import Caller
from tests.encoder.conftest import MakeEncoder
from tests.encoder.pictures import encoded, picture, png_bomb

#: Bytes of the embedding of a 112 x 112 picture: 4 x 4 tokens of 128 float32.
ONE = 16 * 128 * 4


def file(seed: int) -> bytes:
    return encoded(picture(112, 112, seed), "PNG")


def memory(stats: EncoderStats) -> tuple[int, int, int]:
    return stats.free_bytes, stats.in_use_bytes, stats.quarantined_bytes


class Watched:
    """The real vision half, slowed, broken or bent by a test."""

    def __init__(self, vision: VisionRunner) -> None:
        self.vision = vision
        self.calls: list[int] = []
        self.delay_s = 0.0
        self.fault: Exception | None = None
        self.bend = lambda embedding: embedding

    def encode(self, images: Sequence[PixelInput]) -> list[torch.Tensor]:
        self.calls.append(len(images))
        time.sleep(self.delay_s)
        if self.fault is not None:
            raise self.fault
        return [self.bend(embedding) for embedding in self.vision.encode(images)]


@pytest.fixture
def watched(vision: VisionRunner) -> Watched:
    return Watched(vision)


async def until(condition, timeout_s: float = 5.0) -> None:
    async with asyncio.timeout(timeout_s):
        while not condition():
            await asyncio.sleep(0.005)


async def test_embeddings_equal_the_whole_model_of_transformers(
    make_encoder: MakeEncoder, caller: Caller, model_folder: Path
) -> None:
    model = Qwen2VLForConditionalGeneration.from_pretrained(model_folder).eval()
    processor = AutoImageProcessor.from_pretrained(model_folder)
    pictures = [picture(112, 112), picture(300, 90, 1), picture(57, 400, 2), picture(20, 20, 3)]
    encoder = await make_encoder()
    answer = await caller.encode(encoder, *(encoded(one, "PNG") for one in pictures))
    for index, one in enumerate(pictures):
        inputs = processor(images=[one], return_tensors="pt")
        with torch.no_grad():
            expected = model.get_image_features(**inputs).pooler_output[0]
        planned = answer.planned[index]
        embedding = encoder.embedding(planned.handle.handle_id)
        assert tuple(embedding.shape) == tuple(expected.shape) == planned.handle.spec.shape
        torch.testing.assert_close(embedding, expected, rtol=1e-5, atol=1e-5)
        assert planned.handle.spec.plan.grid == tuple(inputs["image_grid_thw"][0].tolist())
        stages = {stage.name: stage for stage in answer.ready[index].stages}
        assert stages["encode"].start_ns >= stages["preprocess"].end_ns


async def test_all_images_are_planned_in_order_before_any_is_encoded(
    make_encoder: MakeEncoder, caller: Caller, watched: Watched
) -> None:
    encoder = await make_encoder(watched)
    async with aclosing(encoder.encode(caller.images([file(0), file(1)]))) as events:
        planned = [await anext(events), await anext(events)]
        assert not watched.calls
    assert [one.image_index for one in planned if isinstance(one, ImagePlanned)] == [0, 1]


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
    assert second.ready[0].stages == ()
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


async def test_f31_failure_reaches_every_waiter_at_once_and_leaves_nothing(
    make_encoder: MakeEncoder, caller: Caller, watched: Watched
) -> None:
    encoder = await make_encoder(watched)
    idle = memory(encoder.stats())
    watched.delay_s, watched.fault = 0.3, RuntimeError("boom")
    calls = [asyncio.create_task(caller.encode(encoder, file(0))) for _ in range(20)]
    await asyncio.wait(calls, return_when=asyncio.FIRST_EXCEPTION)
    await asyncio.sleep(0.02)
    assert all(call.done() for call in calls)
    assert all(isinstance(call.exception(), InternalError) for call in calls)
    assert len({id(call.exception()) for call in calls}) == 20
    assert memory(encoder.stats()) == idle
    assert encoder.stats().open_leases == 0
    watched.fault = None
    assert (await caller.encode(encoder, file(0))).hits == [False]


async def test_f31_undecodable_pixels_fail_every_waiter_naming_its_own_image(
    make_encoder: MakeEncoder, caller: Caller
) -> None:
    encoder = await make_encoder()
    idle = memory(encoder.stats())
    broken = file(0)[:-4000]
    results = await asyncio.gather(
        caller.encode(encoder, broken),
        caller.encode(encoder, file(1), broken),
        return_exceptions=True,
    )
    for result, field in zip(results, ("images[0]", "images[1]"), strict=True):
        assert isinstance(result, InvalidRequestError)
        assert (result.field, result.reason) == (field, "IMAGE_UNREADABLE")
        assert field in result.message
    await until(lambda: encoder.stats().open_leases == 0)
    await until(lambda: memory(encoder.stats()) == idle)


async def test_cancel_of_one_waiter_leaves_the_others_and_of_the_last_stops_the_work(
    make_encoder: MakeEncoder, caller: Caller, watched: Watched
) -> None:
    watched.delay_s = 0.3
    encoder = await make_encoder(watched)
    idle = memory(encoder.stats())
    calls = [asyncio.create_task(caller.encode(encoder, file(0))) for _ in range(3)]
    await until(lambda: encoder.stats().open_leases == 3)
    calls[0].cancel()  # the one that began the work
    await asyncio.gather(calls[0], return_exceptions=True)
    assert encoder.stats().open_leases == 2
    calls[1].cancel()
    answer = await calls[2]
    encoder.release(answer.handle_ids, settled=True)

    blocker = asyncio.create_task(caller.encode(encoder, file(2)))  # keeps the tower busy
    await until(lambda: len(watched.calls) == 2)
    last = asyncio.create_task(caller.encode(encoder, file(1)))
    await until(lambda: encoder.stats().open_leases == 2)
    last.cancel()
    await asyncio.gather(last, return_exceptions=True)
    encoder.release((await blocker).handle_ids, settled=True)
    await until(lambda: memory(encoder.stats()) == idle, timeout_s=1.0)
    assert encoder.stats().open_leases == 0
    assert encoder.stats().encoded_images == 2  # not the one that nobody waits for


async def test_cancel_during_the_forward_keeps_the_memory_until_the_tower_is_through(
    make_encoder: MakeEncoder, caller: Caller, watched: Watched
) -> None:
    watched.delay_s = 0.5
    encoder = await make_encoder(watched)
    call = asyncio.create_task(caller.encode(encoder, file(0)))
    await until(lambda: bool(watched.calls))
    call.cancel()
    await asyncio.gather(call, return_exceptions=True)
    assert encoder.stats().in_use_bytes == ONE  # the tower still writes there
    # The same image again must not find the abandoned work.
    assert (await caller.encode(encoder, file(0))).hits == [False]
    await until(lambda: encoder.stats().in_use_bytes == ONE)


async def test_f26_all_images_of_a_call_get_memory_or_none(
    make_encoder: MakeEncoder, caller: Caller
) -> None:
    """N calls of two images, memory for N images: some are refused, none waits for another."""
    n = 6
    encoder = await make_encoder(embedding_cache_bytes=0, embedding_working_bytes=n * ONE)
    idle = memory(encoder.stats())
    pairs = [(file(2 * k), file(2 * k + 1)) for k in range(n)]
    refused: list[ResourceExhaustedError] = []

    async def served(pair: tuple[bytes, bytes]) -> None:
        while True:
            try:
                answer = await caller.encode(encoder, *pair)
            except ResourceExhaustedError as error:
                refused.append(error)
                await asyncio.sleep(error.retry_after_s)
                continue
            encoder.release(answer.handle_ids, settled=True)
            return

    async with asyncio.timeout(30):
        await asyncio.gather(*(served(pair) for pair in pairs))
    assert refused
    assert {error.reason for error in refused} == {"EMBEDDING_MEMORY"}
    assert memory(encoder.stats()) == idle


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


async def test_larger_than_all_memory_is_refused_at_once(
    make_encoder: MakeEncoder, caller: Caller
) -> None:
    encoder = await make_encoder(embedding_cache_bytes=0, embedding_working_bytes=4096)
    with pytest.raises(ResourceExhaustedError, match=f"{ONE} bytes .* of 4096 are free"):
        await caller.encode(encoder, file(0))


async def test_f33_more_pending_images_than_the_queue_holds_are_refused_with_a_hint(
    make_encoder: MakeEncoder, caller: Caller, watched: Watched
) -> None:
    watched.delay_s = 0.1
    encoder = await make_encoder(watched, max_pending_images=4)
    started = time.monotonic()
    results = await asyncio.gather(
        *(caller.encode(encoder, file(seed)) for seed in range(10)), return_exceptions=True
    )
    refused = [one for one in results if isinstance(one, ResourceExhaustedError)]
    assert len(refused) == 6
    assert {one.reason for one in refused} == {"QUEUE_FULL"}
    assert all(one.retry_after_s > 0 for one in refused)
    assert time.monotonic() - started < 10
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
    assert longest_block_s < 0.25


@pytest.mark.parametrize(
    ("bend", "text"),
    [
        (lambda embedding: embedding * float("nan"), "not finite"),
        (lambda embedding: embedding.index_fill(0, torch.tensor([0]), float("inf")), "not finite"),
        (lambda embedding: embedding[:-1], r"made \[15, 128\] of an image planned as \[16, 128\]"),
    ],
)
async def test_unsound_embedding_is_refused_and_never_cached(
    make_encoder: MakeEncoder, caller: Caller, watched: Watched, bend, text: str
) -> None:
    encoder = await make_encoder(watched)
    watched.bend = bend
    for _ in range(2):
        with pytest.raises(InternalError, match=text):
            await caller.encode(encoder, file(0))
    assert encoder.stats().used_bytes == 0
    watched.bend = lambda embedding: embedding
    assert (await caller.encode(encoder, file(0))).hits == [False]


async def test_one_failing_image_does_not_take_its_batch_neighbours_down(
    make_encoder: MakeEncoder, caller: Caller, watched: Watched, monkeypatch
) -> None:
    watched.delay_s = 0.2
    encoder = await make_encoder(watched)
    blocker = asyncio.create_task(caller.encode(encoder, file(0)))
    await until(lambda: bool(watched.calls))
    real = watched.vision.encode

    class Picky:
        def encode(self, images: Sequence[PixelInput]) -> list[torch.Tensor]:
            if any(image.grid[2] != 8 for image in images):
                raise RuntimeError("too wide")
            return real(images)

    watched.vision = Picky()  # type: ignore[assignment]
    results = await asyncio.gather(
        caller.encode(encoder, file(1)),
        caller.encode(encoder, encoded(picture(168, 56), "PNG")),
        caller.encode(encoder, file(2)),
        return_exceptions=True,
    )
    await blocker
    assert [isinstance(one, InternalError) for one in results] == [False, True, False]


async def test_lease_of_a_reader_expires_into_quarantine_and_then_frees(
    make_encoder: MakeEncoder, caller: Caller
) -> None:
    encoder = await make_encoder(
        embedding_cache_bytes=0, embedding_lease_s=0.3, embedding_hold_s=0.5
    )
    answer = await caller.encode(encoder, file(0))
    assert encoder.stats().in_use_bytes == ONE
    for _ in range(4):
        await asyncio.sleep(0.15)
        assert encoder.renew(answer.handle_ids, reading=True) == []
    await until(lambda: encoder.stats().quarantined_bytes == ONE, 1.0)
    assert encoder.stats().in_use_bytes == 0
    assert encoder.renew(answer.handle_ids) == answer.handle_ids
    assert (encoder.stats().expired_leases, encoder.stats().unknown_renewals) == (1, 1)
    with pytest.raises(NotFoundError):
        encoder.embedding(answer.handle_ids[0])
    await until(lambda: encoder.stats().quarantined_bytes == 0, 1.0)
    assert encoder.stats().used_bytes == 0


async def test_unsettled_release_is_quarantined_until_the_reader_confirms(
    make_encoder: MakeEncoder, caller: Caller
) -> None:
    encoder = await make_encoder(embedding_cache_bytes=0)
    answer = await caller.encode(encoder, file(0))
    encoder.renew(answer.handle_ids, reading=True)
    assert encoder.release(answer.handle_ids, settled=False) == []
    assert encoder.stats().quarantined_bytes == ONE
    assert encoder.release(answer.handle_ids, settled=True) == []
    assert encoder.stats().quarantined_bytes == encoder.stats().used_bytes == 0
    assert encoder.release(answer.handle_ids, settled=True) == answer.handle_ids
    assert encoder.release(["never seen"], settled=False) == ["never seen"]


async def test_memory_without_reader_is_free_at_once(
    make_encoder: MakeEncoder, caller: Caller
) -> None:
    """A request that was cancelled before its prefill worker had heard of it (F10, F12)."""
    encoder = await make_encoder(embedding_cache_bytes=0)
    answer = await caller.encode(encoder, file(0))
    assert encoder.renew(answer.handle_ids) == []  # the router's word is no READ
    assert encoder.release(answer.handle_ids, settled=False) == []
    assert encoder.stats().quarantined_bytes == encoder.stats().used_bytes == 0
    # A reader that comes too late learns it, and does not count what it has read.
    assert encoder.renew(answer.handle_ids, reading=True) == answer.handle_ids


async def test_an_abandoned_call_frees_its_memory(
    make_encoder: MakeEncoder, caller: Caller, watched: Watched
) -> None:
    encoder = await make_encoder(watched, embedding_cache_bytes=0, max_batch=1)
    watched.delay_s = 0.3
    async with aclosing(encoder.encode(caller.images([file(0), file(1)]))) as events:
        for _ in range(3):  # two plans and the first ready
            await anext(events)
    assert encoder.stats().quarantined_bytes == 0
    await until(lambda: encoder.stats().in_use_bytes == 0)


async def test_wrong_digest_is_refused(make_encoder: MakeEncoder, caller: Caller) -> None:
    encoder = await make_encoder()
    good = await caller.encode(encoder, file(0))
    stolen = caller.images([file(0)])[0].digest
    for digest in (stolen, b"", b"short"):
        with pytest.raises(InvalidRequestError) as caught:
            async for _ in encoder.encode([ImageInput(5, digest, file(1))]):
                pass
        assert caught.value.field == "images[5].digest"
    assert encoder.stats().open_leases == len(good.handle_ids)


async def test_bad_calls_are_refused_and_hold_nothing(
    make_encoder: MakeEncoder, caller: Caller
) -> None:
    encoder = await make_encoder(max_images=2)
    idle = memory(encoder.stats())
    for files in ([], [file(0)] * 3, [file(0), b""], [file(0), png_bomb()], [b"text", file(0)]):
        with pytest.raises(InvalidRequestError):
            await caller.encode(encoder, *files)
        assert encoder.stats().open_leases == 0
        assert memory(encoder.stats()) == idle


async def test_same_image_twice_in_one_call_is_encoded_once(
    make_encoder: MakeEncoder, caller: Caller, watched: Watched
) -> None:
    encoder = await make_encoder(watched)
    answer = await caller.encode(encoder, file(0), file(1), file(0))
    assert sum(watched.calls) == 2
    segments = [planned.handle.segment for planned in answer.planned.values()]
    assert segments[0] == segments[2] != segments[1]
    assert len(set(answer.handle_ids)) == 3


async def test_images_of_several_calls_share_forward_passes(
    make_encoder: MakeEncoder, caller: Caller, watched: Watched
) -> None:
    watched.delay_s = 0.3
    encoder = await make_encoder(watched, max_batch=4)
    await asyncio.gather(*(caller.encode(encoder, file(seed)) for seed in range(7)))
    assert sum(watched.calls) == 7
    assert max(watched.calls) > 1
    assert max(watched.calls) <= 4


async def test_hung_tower_fails_the_waiters_in_time(
    make_encoder: MakeEncoder, caller: Caller, watched: Watched
) -> None:
    watched.delay_s = 1.5
    encoder = await make_encoder(watched, encode_timeout_s=0.5)
    started = time.monotonic()
    with pytest.raises(DeadlineExceededError, match=r"images\[0\]: not encoded within 0.5 s"):
        await caller.encode(encoder, file(0))
    assert time.monotonic() - started < 1.2
    assert encoder.stats().in_use_bytes == ONE
    await until(lambda: encoder.stats().in_use_bytes == 0)


async def test_dead_batcher_thread_fails_all_calls_and_reports(
    family, digest_of_model: str, caller: Caller, watched: Watched
) -> None:
    from epd.encoding.encoding_config import EncodingConfig

    causes: list[BaseException] = []
    encoder = Encoder(family, watched, digest_of_model, EncodingConfig(), on_fatal=causes.append)
    await encoder.start()
    watched.fault = SystemExit("out of everything")  # type: ignore[assignment]
    results = await asyncio.gather(
        *(caller.encode(encoder, file(seed)) for seed in range(3)), return_exceptions=True
    )
    assert all(isinstance(one, UnavailableError) for one in results)
    assert isinstance(causes[0], SystemExit)
    with pytest.raises(UnavailableError):
        await caller.encode(encoder, file(9))
    assert encoder.stats().used_bytes == 0
    await encoder.stop()


async def test_stop_fails_what_is_left(
    make_encoder: MakeEncoder, caller: Caller, watched: Watched
) -> None:
    watched.delay_s = 0.2
    encoder = await make_encoder(watched, max_batch=1)
    calls = [asyncio.create_task(caller.encode(encoder, file(seed))) for seed in range(5)]
    await until(lambda: bool(watched.calls))
    await encoder.stop()
    results = await asyncio.gather(*calls, return_exceptions=True)
    assert any(isinstance(one, UnavailableError) for one in results)
    assert not any(isinstance(one, asyncio.CancelledError) for one in results)
    with pytest.raises(UnavailableError):
        await caller.encode(encoder, file(0))
