"""What fails in an encoder reaches everybody who waits, and leaves nothing behind."""

import asyncio
import dataclasses
from collections.abc import Sequence
from contextlib import aclosing

import pytest
import torch

from epd.encoding.encode_batcher import EncodeJob
from epd.encoding.encode_events import ImagePlanned
from epd.encoding.encoder import Encoder
from epd.encoding.encoding_config import EncodingConfig
from epd.encoding.production import Production
from epd.encoding.productions import Productions
from epd.engine.families.base import PixelInput
from epd.errors import (
    DeadlineExceededError,
    InternalError,
    InvalidRequestError,
    NotFoundError,
    UnavailableError,
)
from tests.encoder.calls import Caller
from tests.encoder.conftest import MakeEncoder
from tests.encoder.pictures import encoded, picture
from tests.encoder.watched import ONE, Watched, file, memory, until


async def test_f31_failure_reaches_every_waiter_at_once_and_leaves_nothing(
    make_encoder: MakeEncoder, caller: Caller, watched: Watched
) -> None:
    encoder = await make_encoder(watched)
    idle = memory(encoder.stats())
    watched.gate.clear()
    watched.fault = RuntimeError("boom")
    calls = [asyncio.create_task(caller.encode(encoder, file(0))) for _ in range(20)]
    await until(lambda: encoder.stats().open_leases == 20 and watched.calls == [1])
    watched.gate.set()
    errors = await asyncio.gather(*calls, return_exceptions=True)
    assert watched.calls == [1]  # nobody tried again for itself
    assert all(isinstance(error, InternalError) for error in errors)
    assert len({id(error) for error in errors}) == 20
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


async def test_a_cached_embedding_of_the_wrong_shape_is_refused_on_a_hit(
    make_encoder: MakeEncoder, caller: Caller
) -> None:
    encoder = await make_encoder()
    answer = await caller.encode(encoder, file(0))
    encoder.release(answer.handle_ids, settled=True)
    entry = encoder._store.cache.find(answer.planned[0].handle.digest)
    assert entry is not None
    sound = entry.spec
    for shape in ((15, 128), (16, 64)):
        entry.spec = dataclasses.replace(sound, shape=shape)
        with pytest.raises(InternalError, match=r"expected \(16, 128\)"):
            await caller.encode(encoder, file(0))
        assert encoder.stats().open_leases == 0
    entry.spec = sound


@pytest.mark.parametrize("fault", [None, RuntimeError("boom")])
async def test_who_waits_for_a_handle_hears_of_its_end(
    make_encoder: MakeEncoder, caller: Caller, watched: Watched, fault: Exception | None
) -> None:
    encoder = await make_encoder(watched)
    watched.gate.clear()
    watched.fault = fault
    async with aclosing(encoder.encode(caller.images([file(0)]))) as events:
        planned = await anext(events)
        assert isinstance(planned, ImagePlanned)
        handle_id = planned.handle.handle_id
        waits = [asyncio.create_task(encoder.await_ready(handle_id)) for _ in range(3)]
        await until(lambda: bool(watched.calls))
        assert not any(wait.done() for wait in waits)
        watched.gate.set()
        ends = await asyncio.gather(*waits, return_exceptions=True)
        assert [type(end) for end in ends] == [type(None) if fault is None else InternalError] * 3
    with pytest.raises(NotFoundError):
        await encoder.await_ready(handle_id)


async def test_one_failing_image_does_not_take_its_batch_neighbours_down(
    make_encoder: MakeEncoder, caller: Caller, watched: Watched, submitted: list[EncodeJob]
) -> None:
    watched.gate.clear()
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
    wide = encoded(picture(168, 56), "PNG")
    calls = [asyncio.create_task(caller.encode(encoder, one)) for one in (file(1), wide, file(2))]
    await until(lambda: len(submitted) == 4)
    watched.gate.set()
    results = await asyncio.gather(*calls, return_exceptions=True)
    await blocker
    assert [isinstance(one, InternalError) for one in results] == [False, True, False]


async def test_hung_tower_fails_the_waiters_in_time(
    make_encoder: MakeEncoder,
    caller: Caller,
    watched: Watched,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    give_up = Productions._give_up

    def once_it_is_in_the_tower(productions: Productions, production: Production) -> None:
        if watched.calls:
            give_up(productions, production)
        else:  # this machine was too slow to bring it there in time
            loop = asyncio.get_running_loop()
            loop.call_later(0.01, once_it_is_in_the_tower, productions, production)

    monkeypatch.setattr(Productions, "_give_up", once_it_is_in_the_tower)
    watched.gate.clear()  # for as long as the test likes
    encoder = await make_encoder(watched, encode_timeout_s=0.5)
    with pytest.raises(DeadlineExceededError, match=r"images\[0\]: not encoded within 0.5 s"):
        await caller.encode(encoder, file(0))
    assert encoder.stats().in_use_bytes == ONE
    watched.gate.set()
    await until(lambda: encoder.stats().in_use_bytes == 0)


async def test_dead_batcher_thread_fails_all_calls_and_reports(
    family, digest_of_model: str, caller: Caller, watched: Watched
) -> None:
    causes: list[BaseException] = []
    encoder = Encoder(family, watched, digest_of_model, EncodingConfig(), on_fatal=causes.append)
    await encoder.start()
    watched.fault = SystemExit("out of everything")
    results = await asyncio.gather(
        *(caller.encode(encoder, file(seed)) for seed in range(3)), return_exceptions=True
    )
    assert all(isinstance(one, UnavailableError) for one in results)
    await until(lambda: bool(causes))  # told on its own, after the calls have failed
    assert isinstance(causes[0], SystemExit)
    with pytest.raises(UnavailableError):
        await caller.encode(encoder, file(9))
    assert encoder.stats().used_bytes == 0
    await encoder.stop()


async def test_stop_fails_what_is_left(
    make_encoder: MakeEncoder, caller: Caller, watched: Watched
) -> None:
    watched.gate.clear()
    encoder = await make_encoder(watched, max_batch=1)
    calls = [asyncio.create_task(caller.encode(encoder, file(seed))) for seed in range(5)]
    await until(lambda: bool(watched.calls) and encoder.stats().open_leases == 5)
    stopping = asyncio.create_task(encoder.stop())
    # With the gate open sooner, the tower might get through with all of them first.
    await until(lambda: encoder._maker.batcher._stopping)
    watched.gate.set()
    await stopping
    results = await asyncio.gather(*calls, return_exceptions=True)
    assert any(isinstance(one, UnavailableError) for one in results)
    assert not any(isinstance(one, asyncio.CancelledError) for one in results)
    with pytest.raises(UnavailableError):
        await caller.encode(encoder, file(0))
