"""Prefill begins with images that are still encoded only where nothing else waits for it."""

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from epd.v1 import router_pb2
from tests.router.conftest import Fleet
from tests.router.fake_workers import FakePrefill
from tests.router.harness import (
    RunningRouter,
    eventually,
    lapse,
    load_is_read,
    request,
    router,
    running,
)
from tests.support.answer import collect

OVERLAP = {"encode_overlap": "true"}


def image_requests(prefill: FakePrefill) -> list[Any]:
    """The prompts with images that a prefill worker was sent."""
    return [one for one in prefill.requests if one.images]


async def workers_of(served: RunningRouter) -> Sequence[router_pb2.WorkerStatus]:
    """The workers as the router sees them."""
    return (await served.stub.GetModel(router_pb2.GetModelRequest())).workers


async def test_an_idle_prefill_worker_begins_while_the_images_are_encoded(
    model: Path, fleet: Fleet
) -> None:
    fleet.encoder.ready_when = lambda: bool(image_requests(fleet.prefill))
    async with running(*fleet.workers), router(model, fleet.workers, **OVERLAP) as served:
        await collect(served.stub.Generate(request("hi", [b"a", b"b"], max_tokens=2)))
    (sent,) = image_requests(fleet.prefill)
    assert [image.pending for image in sent.images] == [True, True]


async def test_off_it_begins_with_all_images(model: Path, fleet: Fleet) -> None:
    async with running(*fleet.workers), router(model, fleet.workers, encode_overlap="false") as on:
        await collect(on.stub.Generate(request("hi", [b"a", b"b"], max_tokens=2)))
    (sent,) = image_requests(fleet.prefill)
    assert [image.pending for image in sent.images] == [False, False]


async def test_a_prefill_worker_with_a_prompt_is_sent_nothing_before_it_can_compute_all_of_it(
    model: Path, fleet: Fleet
) -> None:
    ready = asyncio.Event()
    fleet.encoder.ready_when = ready.is_set
    async with running(*fleet.workers), router(model, fleet.workers, **OVERLAP) as served:
        fleet.prefill.prefill_s = 60
        text = served.stub.Generate(request("a long prompt"))
        await eventually(lambda: fleet.prefill.open_calls == 1)
        fleet.prefill.prefill_s = 0
        asked = asyncio.create_task(
            collect(served.stub.Generate(request("hi", [b"a"], max_tokens=2)))
        )
        await eventually(lambda: bool(fleet.encoder.seen))
        await lapse(0.3)  # it would go there at once
        assert not image_requests(fleet.prefill)
        ready.set()
        await asked
        text.cancel()
    (sent,) = image_requests(fleet.prefill)
    assert not sent.images[0].pending


async def test_work_of_other_routers_counts(model: Path, fleet: Fleet) -> None:
    fleet.prefill.load.running_requests = 5
    async with running(*fleet.workers), router(model, fleet.workers, **OVERLAP) as served:
        await load_is_read(fleet.prefill)
        await collect(served.stub.Generate(request("hi", [b"a"], max_tokens=2)))
    (sent,) = image_requests(fleet.prefill)
    assert not sent.images[0].pending


async def test_of_many_at_once_one_per_idle_worker_begins(model: Path, fleet: Fleet) -> None:
    second = FakePrefill(fleet.fabric)
    second.encoder = fleet.encoder
    prefills = (fleet.prefill, second)
    ready = asyncio.Event()
    fleet.encoder.ready_when = ready.is_set
    for prefill in prefills:
        prefill.token_s = 1e-6
    workers = [*fleet.workers, second]
    async with running(*workers), router(model, workers, **OVERLAP) as served:
        calls = [
            asyncio.create_task(
                collect(served.stub.Generate(request("hi", [bytes([n])], max_tokens=2)))
            )
            for n in range(8)
        ]
        async with prefills[0].engine, prefills[1].engine:  # neither is done with its first one
            await eventually(lambda: len(fleet.encoder.seen) == 8)
            await eventually(lambda: all(image_requests(prefill) for prefill in prefills))
            await lapse(0.2)
            assert [len(image_requests(prefill)) for prefill in prefills] == [1, 1]
        ready.set()
        await asyncio.gather(*calls)
    pending = [one.images[0].pending for prefill in prefills for one in image_requests(prefill)]
    assert sum(pending) == 2


async def test_time_in_which_images_are_planned_and_no_decode_worker_is_there_counts_once(
    model: Path, fleet: Fleet
) -> None:
    fleet.encoder.ready_when = lambda: bool(image_requests(fleet.prefill))
    settings = {**OVERLAP, "worker_patience_s": "30"}
    async with running(*fleet.workers), router(model, fleet.workers, **settings) as served:
        await fleet.decode.set_health(False)
        async with asyncio.timeout(15):
            while all(one.healthy for one in await workers_of(served)):
                await asyncio.sleep(0.01)
        asked = asyncio.create_task(
            collect(served.stub.Generate(request("hi", [b"a"], max_tokens=2)))
        )
        await eventually(lambda: bool(fleet.encoder.seen))
        await lapse(1.0)
        await fleet.decode.set_health(True)
        completion = (await asked).completion
    stages = {timing.stage: timing.duration_ns for timing in completion.timings}
    assert stages["router.dispatch"] > 500_000_000
    assert stages["encoder.plan"] + stages["router.dispatch"] <= completion.ttft_ns
