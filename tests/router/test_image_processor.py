"""Encoders that read images differently: most of them decide, and no image meets another."""

import asyncio
from pathlib import Path

import grpc

from epd.image_digest import image_digest
from epd.v1 import router_pb2
from services.router.image_processor import FleetProcessor
from services.router.workers import Role, Worker, WorkerInfo
from tests.router.conftest import Fleet
from tests.router.fake_workers import FakeEncoder
from tests.router.harness import RunningRouter, eventually, failure, request, router, running
from tests.support.answer import collect


def reader(digest: str, role: Role = Role.ENCODER) -> Worker:
    """A worker as far as this is concerned."""
    worker = object.__new__(Worker)
    worker.role = role
    worker.info = WorkerInfo("i", "m", "d", digest, 100, accepts_images=True, max_images=8)
    return worker


async def reasons(served: RunningRouter) -> dict[str, str]:
    """Why encoders take no requests, by address; empty for those that do."""
    answer = await served.stub.GetModel(router_pb2.GetModelRequest())
    return {one.address: one.reason for one in answer.workers if one.role == "encoder"}


async def until_refused(served: RunningRouter, *refused: FakeEncoder) -> None:
    """Waits until exactly these encoders take no requests."""
    expected = {one.address for one in refused}
    async with asyncio.timeout(15):
        while {address for address, why in (await reasons(served)).items() if why} != expected:
            await asyncio.sleep(0.01)


def test_most_encoders_decide_and_of_equally_many_the_settings_in_use_stay() -> None:
    fleet = FleetProcessor()
    old, new = reader("old"), reader("new")
    fleet.update([old])
    fleet.update([new, old])
    assert fleet.digest == "old"
    assert fleet.objection(old) == ""
    assert "reads images with processor new" in fleet.objection(new)
    fleet.update([new, old, new])
    assert fleet.digest == "new"
    assert fleet.objection(old)
    fleet.update([])
    assert fleet.digest == "new"


def test_unified_workers_decide_only_where_no_encoder_is() -> None:
    fleet = FleetProcessor()
    unified, text_only = reader("unified", Role.DECODE), reader("", Role.DECODE)
    fleet.update([unified, text_only])
    assert fleet.digest == "unified"
    assert fleet.objection(text_only) == ""
    assert fleet.objection(reader("other", Role.DECODE))
    fleet.update([unified, text_only, reader("encoder")])
    assert fleet.digest == "encoder"
    # It decodes; images go to the encoders.
    assert fleet.objection(unified) == ""


async def test_an_encoder_with_other_settings_is_listed_with_the_reason_and_gets_no_image(
    model: Path, fleet: Fleet
) -> None:
    second, odd = FakeEncoder(), FakeEncoder(processor_digest="p2")
    fleet.prefill.encoder = None
    workers = [odd, second, *fleet.workers]
    async with running(*workers), router(model, workers) as served:

        async def ask(number: int) -> None:
            await collect(served.stub.Generate(request("hi", [bytes([number])], max_tokens=1)))

        await until_refused(served, odd)
        assert "processor p2" in (await reasons(served))[odd.address]
        for number in range(8):
            await ask(number)
        assert not odd.calls["Encode"]
        # Once it is alone the fleet reads images its way.
        await fleet.encoder.set_health(False)
        await second.set_health(False)
        await until_refused(served, fleet.encoder, second)
        await ask(100)
        assert odd.seen == [image_digest("d1", "p2", bytes([100]))]


async def test_an_image_that_was_hashed_for_other_settings_never_meets_these(
    model: Path, fleet: Fleet
) -> None:
    """The encoders it was hashed for die while they have it, and another kind is all there is."""
    second, odd = FakeEncoder(), FakeEncoder(processor_digest="p2")
    for encoder in (fleet.encoder, second):
        encoder.ready_when = lambda: False
    workers = [*fleet.workers, second, odd]
    async with running(*workers), router(model, workers) as served:
        await until_refused(served, odd)
        call = served.stub.Generate(request("hi", [b"image"], max_tokens=1))
        await eventually(lambda: bool(fleet.encoder.seen or second.seen))
        await asyncio.gather(fleet.encoder.stop(), second.stop())
        error = await failure(call)
        assert error.code() is grpc.StatusCode.UNAVAILABLE
        assert not odd.seen
        await until_refused(served, fleet.encoder, second)
        await collect(served.stub.Generate(request("hi", [b"image"], max_tokens=1)))
        assert odd.seen == [image_digest("d1", "p2", b"image")]
