"""Which workers requests go to."""

import asyncio
from pathlib import Path

import grpc
import pytest

from epd.image_digest import image_digest
from epd.v1 import common_pb2, router_pb2
from tests.router.conftest import Fleet
from tests.router.fake_workers import FakeDecode, FakeEncoder, FakePrefill, FakeWorker
from tests.router.harness import (
    RunningRouter,
    eventually,
    failure,
    load_is_read,
    request,
    router,
    running,
)
from tests.support.answer import collect


@pytest.mark.parametrize("concurrency", [1, 16])
async def test_f37_equal_workers_get_40_to_60_percent_each(
    model: Path, fleet: Fleet, concurrency: int
) -> None:
    others = [FakePrefill(fleet.fabric), FakeDecode(fleet.fabric)]
    workers: list[FakeWorker] = [*fleet.workers, *others]
    # One at a time it is chance alone: this many are uneven once in 100 000 runs.
    total = 500
    async with running(*workers), router(model, workers) as served:
        slots = asyncio.Semaphore(concurrency)

        async def ask() -> None:
            async with slots:
                await collect(served.stub.Generate(request("shared system prompt", max_tokens=2)))

        async with asyncio.TaskGroup() as group:
            for _ in range(total):
                group.create_task(ask())
    for worker in (fleet.prefill, fleet.decode, *others):
        assert 0.4 * total <= len(worker.requests) <= 0.6 * total


async def test_f38_the_same_image_goes_to_the_encoder_that_holds_it(
    model: Path, fleet: Fleet
) -> None:
    encoders = [fleet.encoder, FakeEncoder(), FakeEncoder()]
    workers = [*encoders, fleet.prefill, fleet.decode]
    fleet.prefill.encoder = None
    # Homes depend on the encoders' ports: of so few as 12, one encoder would get none in 43 runs.
    images = [bytes([index]) for index in range(40)]
    async with running(*workers), router(model, workers) as served:
        for _ in range(3):
            for image in images:
                await collect(served.stub.Generate(request("hi", [image], max_tokens=1)))
    homes = {
        digest: [index for index, encoder in enumerate(encoders) if digest in encoder.seen]
        for digest in (image_digest("d1", "p1", image) for image in images)
    }
    assert all(len(home) == 1 for home in homes.values())
    assert len({home[0] for home in homes.values()}) == 3


async def test_f38_an_overloaded_encoder_is_passed_over(model: Path, fleet: Fleet) -> None:
    other = FakeEncoder()
    workers = [*fleet.workers, other]
    # None is ready before all have been asked for, however long that takes.
    all_asked = lambda: len(fleet.encoder.seen) + len(other.seen) == 20  # noqa: E731
    fleet.encoder.ready_when = other.ready_when = all_asked
    async with running(*workers), router(model, workers) as served:
        calls = [
            asyncio.create_task(collect(served.stub.Generate(request("hi", [b"same"]))))
            for _ in range(20)
        ]
        await asyncio.gather(*calls)
    assert min(len(fleet.encoder.seen), len(other.seen)) >= 7


async def test_load_that_other_routers_cause_is_seen_in_reports(model: Path, fleet: Fleet) -> None:
    other = FakePrefill(fleet.fabric)
    workers = [*fleet.workers, other]
    fleet.prefill.load.running_requests = 5
    async with running(*workers), router(model, workers) as served:
        await load_is_read(fleet.prefill)
        for _ in range(10):
            await collect(served.stub.Generate(request(max_tokens=2)))
    assert other.calls["Prefill"] == 10


async def test_booked_load_is_given_back_on_every_path(model: Path, fleet: Fleet) -> None:
    async with running(*fleet.workers), router(model, fleet.workers) as served:
        await collect(served.stub.Generate(request("hi", [b"i"])))
        fleet.decode.die_at = 3
        await collect(served.stub.Generate(request("hi", [b"i"])))
        fleet.prefill.prefill_s = 30
        call = served.stub.Generate(request("hi", [b"i"]))
        await eventually(lambda: fleet.prefill.open_calls == 1)
        assert {state.role: state.in_flight for state in await _workers(served)} == {
            "encoder": 0,
            "prefill": 1,
            "decode": 1,
        }
        call.cancel()
        await eventually(lambda: fleet.prefill.open_calls == 0)
        async with asyncio.timeout(15):
            while any(state.in_flight for state in await _workers(served)):
                await asyncio.sleep(0.01)


@pytest.mark.parametrize("how", ["unhealthy", "draining", "other model"])
async def test_a_worker_that_must_not_be_used_gets_nothing_and_the_reason_is_told(
    model: Path, fleet: Fleet, how: str
) -> None:
    other = FakePrefill(fleet.fabric)
    workers = [*fleet.workers, other]
    if how == "other model":
        other.info.model_digest = "d2"
    if how == "draining":
        other.load.draining = True
    async with running(*workers), router(model, workers, model_digest="d1") as served:
        if how == "unhealthy":
            await other.set_health(False)
        await _until_reason(served, other)
        for _ in range(10):
            await collect(served.stub.Generate(request(max_tokens=2)))
    assert other.calls["Prefill"] == 0
    assert fleet.prefill.calls["Prefill"] == 10


async def test_a_draining_worker_finishes_what_it_has(model: Path, fleet: Fleet) -> None:
    fleet.decode.token_s = 0.03
    async with running(*fleet.workers), router(model, fleet.workers) as served:
        reading = asyncio.create_task(collect(served.stub.Generate(request(max_tokens=12))))
        await eventually(lambda: fleet.decode.emitted > 0)
        await fleet.decode.set_health(False)
        await _until_reason(served, fleet.decode)
        answer = await reading
    assert len(answer.token_ids) == 12
    assert answer.completion.attempt_count == 1


async def test_f21_a_pair_that_does_not_fit_is_not_used(model: Path, fleet: Fleet) -> None:
    other = FakeDecode(fleet.fabric, kv_layout=common_pb2.KvLayout(block_size=16, dtype="float32"))
    workers = [*fleet.workers, other]
    async with running(*workers), router(model, workers) as served:
        for _ in range(10):
            await collect(served.stub.Generate(request(max_tokens=2)))
        assert other.calls["Decode"] == 0
        await fleet.decode.stop()
        await _until_reason(served, fleet.decode)
        error = await failure(served.stub.Generate(request()))
    assert error.code() is grpc.StatusCode.FAILED_PRECONDITION
    assert "block_size=32" in str(error.details())
    assert "block_size=16" in str(error.details())


async def test_f16_a_restarted_worker_at_the_same_address_is_a_new_worker(
    model: Path, fleet: Fleet
) -> None:
    async with running(*fleet.workers), router(model, fleet.workers) as served:
        await collect(served.stub.Generate(request()))
        port = int(fleet.prefill.address.rpartition(":")[2])
        seen = {fleet.prefill.instance_id}
        for _ in range(3):
            await fleet.prefill.stop()
            fleet.prefill = FakePrefill(fleet.fabric, port=port)
            await fleet.prefill.start()
            async with asyncio.timeout(15):
                while (prefill := await _state(served, fleet.prefill)).instance_id in seen or (
                    not prefill.healthy
                ):
                    await asyncio.sleep(0.02)
            seen.add(prefill.instance_id)
            answer = await collect(served.stub.Generate(request()))
            assert len(answer.token_ids) == 8
        assert len(seen) == 4
        await fleet.prefill.stop()


async def _workers(served: RunningRouter) -> list[router_pb2.WorkerStatus]:
    response = await served.stub.GetModel(router_pb2.GetModelRequest())
    return list(response.workers)


async def _state(served: RunningRouter, worker: FakeWorker) -> router_pb2.WorkerStatus:
    return next(state for state in await _workers(served) if state.address == worker.address)


async def _until_reason(served: RunningRouter, worker: FakeWorker) -> None:
    async with asyncio.timeout(15):
        while (state := await _state(served, worker)).healthy:
            await asyncio.sleep(0.01)
    assert state.reason


async def test_a_fleet_that_names_no_encoder_is_ready_for_texts_without_a_wait(
    model: Path, fleet: Fleet
) -> None:
    """The model takes images, but no encoder can come; that is not to be waited for."""
    workers = [fleet.prefill, fleet.decode]
    async with (
        asyncio.timeout(30),
        running(*workers),
        router(model, workers, worker_wait_s="200") as served,
    ):
        await collect(served.stub.Generate(request("hello")))
        error = await failure(served.stub.Generate(request("hello", [b"image"])))
        assert error.code() is grpc.StatusCode.UNAVAILABLE
