"""What fails on a worker reaches the client with the right status, and the other legs end."""

import asyncio
import contextlib
import time
from pathlib import Path

import grpc
import pytest

from epd.errors import (
    InvalidRequestError,
    ResourceExhaustedError,
    TransferFailedError,
    UnavailableError,
)
from epd.rpc.status import error_from_rpc
from epd.v1 import router_pb2
from tests.router.conftest import Fleet
from tests.router.fake_workers import FakeEncoder, FakePrefill
from tests.router.harness import (
    RunningRouter,
    eventually,
    failure,
    lapse,
    request,
    router,
    running,
)
from tests.support.answer import Answer, collect


async def test_f34_prefills_rejection_reaches_the_client_while_decode_waits(
    model: Path, fleet: Fleet
) -> None:
    fleet.prefill.failures = [InvalidRequestError("bad grid", field="images[0]")]
    async with running(*fleet.workers), router(model, fleet.workers) as served:
        # Decode waits for a seal that never comes: without an end from outside, for ever.
        async with asyncio.timeout(20):
            error = await failure(served.stub.Generate(request("hi", [b"image"])))
        assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert error.details() == "bad grid"
        await eventually(lambda: fleet.decode.open_calls == 0)
        await eventually(lambda: not fleet.encoder.held)
    assert fleet.prefill.calls["Prefill"] == 1


async def test_f34_prefills_error_wins_over_what_decode_says_in_consequence(
    model: Path, fleet: Fleet
) -> None:
    """Decode's stream breaks first; the cause comes from prefill a moment later."""
    fleet.decode.failures = [TransferFailedError("sender gave up")]
    fleet.prefill.prefill_s = 0.05

    fleet.prefill.late_failures = [InvalidRequestError("the cause", field="x")]
    settings = {"culprit_grace_s": "30"}
    async with running(*fleet.workers), router(model, fleet.workers, **settings) as served:
        error = await failure(served.stub.Generate(request()))
    assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert error.details() == "the cause"
    assert fleet.prefill.calls["Prefill"] == 1


async def test_f35_a_failed_decode_call_cancels_prefills_work(model: Path, fleet: Fleet) -> None:
    fleet.decode.failures = [InvalidRequestError("no", field="x")]
    fleet.prefill.prefill_s = 60
    async with running(*fleet.workers), router(model, fleet.workers) as served:
        async with asyncio.timeout(20):
            error = await failure(served.stub.Generate(request("hi", [b"image"])))
        assert error.details() == "no"
        await eventually(lambda: fleet.prefill.open_calls == 0)
        await eventually(lambda: not fleet.encoder.held)
    # Prefill may have begun to read: only it can say that the memory is free.
    assert fleet.encoder.settled == [False]


async def test_a_failed_encode_cancels_its_siblings_and_releases_their_handles(
    model: Path, fleet: Fleet
) -> None:
    other = FakeEncoder(fleet.fabric)
    workers = [*fleet.workers, other]
    for encoder in (fleet.encoder, other):
        encoder.encode_s = 30
    images = [bytes([index]) for index in range(8)]
    async with running(*workers), router(model, workers) as served:
        call = served.stub.Generate(request("hi", images))
        waiting = asyncio.create_task(failure(call))
        await eventually(lambda: len(fleet.encoder.held) + len(other.held) == 8)
        assert fleet.encoder.held
        assert other.held
        await eventually(lambda: other.encoding == 1)  # it sends nothing just now
        await other.break_calls(InvalidRequestError("truncated image", field="images[3]"))
        error = await waiting
        assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert error.details() == "truncated image"
        await eventually(lambda: fleet.encoder.open_calls == 0)
        await eventually(lambda: not fleet.encoder.held and not other.held)
    assert fleet.prefill.calls["Prefill"] == 0
    assert set(fleet.encoder.settled) == {True}


async def test_leases_are_renewed_while_other_images_are_encoded(model: Path, fleet: Fleet) -> None:
    fleet.encoder.lease_ms = 150
    fleet.encoder.ready_when = lambda: fleet.encoder.renewals >= 2
    async with running(*fleet.workers), router(model, fleet.workers) as served:
        answer = await collect(served.stub.Generate(request("hi", [b"one", b"two"])))
    assert len(answer.token_ids) == 8


async def test_an_embedding_that_the_encoder_has_dropped_is_encoded_again(
    model: Path, fleet: Fleet
) -> None:
    fleet.encoder.lease_ms = 60
    fleet.encoder.encode_s = 60
    async with running(*fleet.workers), router(model, fleet.workers) as served:
        reading = asyncio.create_task(collect(served.stub.Generate(request("hi", [b"one"]))))
        await eventually(lambda: fleet.encoder.renewals > 0)  # so it is encoding
        fleet.encoder.encode_s = 0  # for the next call
        fleet.encoder.held.clear()
        answer = await reading
    assert answer.completion.attempt_count == 2


@pytest.mark.parametrize("stage", ["encode", "prefill", "decode"])
async def test_cancel_reaches_every_leg_and_releases_handles(
    model: Path, fleet: Fleet, stage: str
) -> None:
    slow = {"encode": "encode_s", "prefill": "prefill_s", "decode": "token_s"}[stage]
    worker = {"encode": fleet.encoder, "prefill": fleet.prefill, "decode": fleet.decode}[stage]
    setattr(worker, slow, 60.0)
    async with running(*fleet.workers), router(model, fleet.workers) as served:
        call = served.stub.Generate(request("hi", [b"image"], request_id="again"))
        reading = asyncio.create_task(collect(call))
        await eventually(lambda: worker.open_calls == 1)
        await asyncio.sleep(0.05)
        reading.cancel()
        await eventually(lambda: all(worker.open_calls == 0 for worker in fleet.workers))
        await eventually(lambda: not fleet.encoder.held)
        setattr(worker, slow, 0.0)
        async with asyncio.timeout(15):
            while any(state.in_flight for state in await _workers(served)):
                await asyncio.sleep(0.01)
        answer = await _with_a_free_id(served, request("hi", [b"image"], request_id="again"))
        assert len(answer.token_ids) == 8


async def _with_a_free_id(served: RunningRouter, message: router_pb2.GenerateRequest) -> Answer:
    """The answer, once the router has given up the request that had the id before."""
    deadline_s = time.monotonic() + 15
    while True:
        try:
            return await collect(served.stub.Generate(message))
        except grpc.aio.AioRpcError as refusal:
            if refusal.code() is not grpc.StatusCode.ALREADY_EXISTS:
                raise
        assert time.monotonic() < deadline_s, "the id is never free again"
        await asyncio.sleep(0.01)


async def test_the_clients_deadline_is_passed_on_and_ends_every_leg(
    model: Path, fleet: Fleet
) -> None:
    fleet.prefill.prefill_s = 60
    legs = (fleet.prefill, fleet.decode)
    async with running(*fleet.workers), router(model, fleet.workers) as served:
        for timeout_s in (2, 8, 32):  # it may pass before the legs are called
            error = await failure(served.stub.Generate(request(), timeout=timeout_s))
            assert error.code() is grpc.StatusCode.DEADLINE_EXCEEDED
            await eventually(lambda: all(worker.open_calls == 0 for worker in fleet.workers))
            if all(leg.time_left_s for leg in legs):
                break
    # The router's own deadline is minutes. What gRPC says is left may be rounded up.
    for leg in legs:
        assert 0 < leg.time_left_s[-1] < timeout_s + 1


async def test_the_routers_own_deadline_holds_when_the_client_gives_none(
    model: Path, fleet: Fleet
) -> None:
    fleet.decode.token_s = 60
    async with (
        running(*fleet.workers),
        router(model, fleet.workers, request_timeout_s="0.3") as served,
    ):
        error = await failure(served.stub.Generate(request(max_tokens=100)))
    assert error.code() is grpc.StatusCode.DEADLINE_EXCEEDED
    assert "0.3 s" in str(error.details())


async def test_the_first_token_has_a_budget_of_its_own(model: Path, fleet: Fleet) -> None:
    fleet.prefill.prefill_s = 60
    async with (
        running(*fleet.workers),
        router(model, fleet.workers, first_token_timeout_s="1.5") as served,
    ):
        error = await failure(served.stub.Generate(request()))
        assert error.code() is grpc.StatusCode.DEADLINE_EXCEEDED
        assert error_from_rpc(error).reason == "FIRST_TOKEN_TIMEOUT"
        # Once there is a token, only the deadline counts.
        fleet.prefill.prefill_s, fleet.decode.token_s = 0, 0.3
        for _ in range(5):  # the budget may be over while this process stands still
            answer = Answer()
            with contextlib.suppress(grpc.aio.AioRpcError):
                async for response in served.stub.Generate(request(max_tokens=8)):
                    answer.add(response)
            if answer.token_ids:
                break
    assert len(answer.token_ids) == 8


async def test_a_full_worker_is_told_to_the_client_after_others_were_tried_once(
    model: Path, fleet: Fleet
) -> None:
    other = FakePrefill(fleet.fabric)
    workers = [*fleet.workers, other]
    full = ResourceExhaustedError("queue full", retry_after_s=2.5)
    fleet.prefill.failures, other.failures = [full] * 5, [full] * 5
    async with running(*workers), router(model, workers) as served:
        error = error_from_rpc(await failure(served.stub.Generate(request())))
    assert isinstance(error, ResourceExhaustedError)
    assert error.retry_after_s == 2.5
    assert fleet.prefill.calls["Prefill"] == other.calls["Prefill"] == 1


async def test_a_full_worker_is_not_tried_twice_when_there_is_no_other(
    model: Path, fleet: Fleet
) -> None:
    fleet.prefill.failures = [ResourceExhaustedError("queue full")] * 5
    async with running(*fleet.workers), router(model, fleet.workers) as served:
        error = await failure(served.stub.Generate(request()))
    assert error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert fleet.prefill.calls["Prefill"] == 1


@pytest.mark.parametrize("role", ["encoder", "prefill", "decode"])
async def test_without_workers_the_answer_is_unavailable_with_a_hint_after_the_patience(
    model: Path, fleet: Fleet, role: str
) -> None:
    async with running(*fleet.workers), router(model, fleet.workers) as served:
        await getattr(fleet, role).stop()
        await _gone(served, role)
        started = time.monotonic()
        async with asyncio.timeout(20):
            error = await failure(served.stub.Generate(request("hi", [b"image"])))
        assert time.monotonic() - started > 0.25
    told = error_from_rpc(error)
    assert isinstance(told, UnavailableError)
    assert told.reason == f"NO_{role.upper()}_WORKER"
    assert told.retry_after_s > 0


@pytest.mark.parametrize("lost", [("prefill",), ("encoder",), ("encoder", "prefill", "decode")])
async def test_a_request_waits_for_a_worker_that_is_about_to_be_back(
    model: Path, fleet: Fleet, lost: tuple[str, ...]
) -> None:
    settings = {"worker_patience_s": "30"}
    async with running(*fleet.workers), router(model, fleet.workers, **settings) as served:
        for role in lost:
            await getattr(fleet, role).stop()
            await _gone(served, role)
        call = asyncio.create_task(collect(served.stub.Generate(request("hi", [b"image"]))))
        await lapse(0.3)
        assert not call.done()
        for role in lost:  # again, at its address
            await getattr(fleet, role).start()
        answer = await call
    assert answer.completion.attempt_count == 1


async def test_a_worker_bug_is_internal_with_a_fixed_text(model: Path, fleet: Fleet) -> None:
    async def crash() -> None:
        raise ValueError("secret")

    fleet.decode.before = crash
    async with running(*fleet.workers), router(model, fleet.workers) as served:
        error = await failure(served.stub.Generate(request()))
    assert error.code() is grpc.StatusCode.INTERNAL
    assert "secret" not in str(error.details())


async def _gone(served: RunningRouter, role: str) -> None:
    """Waits until the router knows that the only worker of a role has gone."""
    async with asyncio.timeout(15):
        while any(state.healthy for state in await _workers(served) if state.role == role):
            await asyncio.sleep(0.01)


async def _workers(served: RunningRouter) -> list[router_pb2.WorkerStatus]:
    response = await served.stub.GetModel(router_pb2.GetModelRequest())
    return list(response.workers)
