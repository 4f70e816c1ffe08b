"""Attempts after a failure: unseen before the first token, gap-free after it."""

import asyncio
from pathlib import Path

import grpc
import pytest

from epd.errors import (
    DataLossError,
    EpdError,
    NotFoundError,
    ResourceExhaustedError,
    TransferFailedError,
    UnavailableError,
)
from epd.v1 import common_pb2
from tests.router.conftest import Fleet
from tests.router.fake_workers import (
    FakeDecode,
    FakeEncoder,
    FakePrefill,
    FakeWorker,
    answer_token,
)
from tests.router.harness import eventually, failure, request, router, running
from tests.router.model_folder import END
from tests.support.answer import Answer, collect


@pytest.mark.parametrize(
    "error",
    [
        UnavailableError("draining"),
        TransferFailedError("write failed at layer 3"),
        NotFoundError("earlier instance"),
    ],
)
@pytest.mark.parametrize("role", ["encoder", "prefill", "decode"])
async def test_a_failure_before_the_first_token_is_not_seen_by_the_client(
    model: Path, fleet: Fleet, role: str, error: EpdError
) -> None:
    if role == "decode":
        fleet.prefill.prefill_s = 0.05
    getattr(fleet, role).failures = [error]
    async with running(*fleet.workers), router(model, fleet.workers) as served:
        answer = await collect(served.stub.Generate(request("hi", [b"image"], seed=5)))
        assert answer.token_ids == [answer_token(5, position) for position in range(8)]
        assert answer.completion.attempt_count == 2
        await eventually(lambda: not fleet.encoder.held)


async def test_a_retry_prefers_a_worker_that_has_not_failed(model: Path, fleet: Fleet) -> None:
    other = FakePrefill(fleet.fabric)
    fleet.prefill.failures = [UnavailableError("no")] * 100
    workers = [*fleet.workers, other]
    async with running(*workers), router(model, workers) as served:
        for _ in range(10):
            answer = await collect(served.stub.Generate(request()))
            assert len(answer.token_ids) == 8
    assert other.calls["Prefill"] == 10


async def test_attempts_are_bounded_and_the_last_error_is_told(model: Path, fleet: Fleet) -> None:
    fleet.prefill.failures = [TransferFailedError(f"layer {layer}") for layer in range(9)]
    async with running(*fleet.workers), router(model, fleet.workers, max_attempts="3") as served:
        error = await failure(served.stub.Generate(request()))
    assert error.code() is grpc.StatusCode.ABORTED
    assert error.details() == "layer 2"
    assert fleet.prefill.calls["Prefill"] == 3


async def test_damaged_data_is_not_retried(model: Path, fleet: Fleet) -> None:
    fleet.prefill.failures = [DataLossError("checksum")]
    async with running(*fleet.workers), router(model, fleet.workers) as served:
        error = await failure(served.stub.Generate(request()))
    assert error.code() is grpc.StatusCode.DATA_LOSS


@pytest.mark.parametrize("position", [1, 2, 10, 19])
async def test_an_answer_goes_on_without_a_gap_after_decode_dies(
    model: Path, fleet: Fleet, position: int
) -> None:
    fleet.decode.die_at = position
    async with running(*fleet.workers), router(model, fleet.workers) as served:
        answer = await collect(served.stub.Generate(request("hi", [b"i"], seed=9, max_tokens=20)))
    assert answer.token_ids == [answer_token(9, index) for index in range(20)]
    assert answer.completion.usage.completion_tokens == 20
    assert answer.completion.attempt_count == 2
    replay = fleet.prefill.requests[1]
    first = fleet.prefill.requests[0]
    assert replay.emitted_count == position
    assert list(replay.token_ids) == [*first.token_ids, *answer.token_ids[:position]]
    assert replay.sampling == first.sampling
    assert replay.transfer_id != first.transfer_id
    assert answer.completion.usage.prompt_tokens == len(first.token_ids)


async def test_a_replay_finds_its_own_prompt_and_usage_does_not_count_that(
    model: Path, fleet: Fleet
) -> None:
    fleet.decode.die_at = 6
    fleet.prefill.token_s = 1e-6
    async with running(*fleet.workers), router(model, fleet.workers) as served:
        answer = await collect(served.stub.Generate(request("hello " * 40, max_tokens=12)))
        again = await collect(served.stub.Generate(request("hello " * 40, max_tokens=12)))
    assert answer.completion.attempt_count == 2
    assert answer.completion.usage.cached_tokens == 0
    assert again.completion.usage.cached_tokens > 0


async def test_a_minted_seed_is_the_same_in_every_attempt(model: Path, fleet: Fleet) -> None:
    fleet.decode.die_at = 3
    message = request()
    message.sampling.ClearField("seed")
    async with running(*fleet.workers), router(model, fleet.workers) as served:
        await collect(served.stub.Generate(message))
        await collect(served.stub.Generate(message))
    seeds = [call.sampling.seed for call in fleet.prefill.requests]
    assert seeds[0] == seeds[1]
    assert seeds[2] != seeds[0]


async def test_a_preempted_answer_is_replayed(model: Path, fleet: Fleet) -> None:
    fleet.decode.preempt_at = 6
    async with running(*fleet.workers), router(model, fleet.workers) as served:
        answer = await collect(served.stub.Generate(request(max_tokens=12)))
    assert answer.token_ids == [answer_token(0, index) for index in range(12)]
    assert fleet.prefill.requests[1].emitted_count == 6


async def test_a_started_answer_waits_for_room_where_a_new_request_would_be_refused(
    model: Path, fleet: Fleet
) -> None:
    fleet.decode.preempt_at = 6

    async def then_full() -> None:
        if fleet.prefill.calls["Prefill"] == 1:
            fleet.prefill.failures = [ResourceExhaustedError("full")]

    fleet.prefill.after_first_token = then_full
    async with running(*fleet.workers), router(model, fleet.workers) as served:
        answer = await collect(served.stub.Generate(request(max_tokens=12)))
    assert answer.token_ids == [answer_token(0, index) for index in range(12)]


async def test_an_answer_whose_last_token_was_the_end_is_not_continued(
    model: Path, fleet: Fleet
) -> None:
    """Decode dies after the end token and before it can say that it has finished."""
    fleet.decode.last_words = [END]
    fleet.decode.die_at = 4
    async with running(*fleet.workers), router(model, fleet.workers) as served:
        answer = await collect(served.stub.Generate(request(max_tokens=20)))
    assert answer.token_ids == [*(answer_token(0, index) for index in range(4)), END]
    assert fleet.prefill.calls["Prefill"] == 1
    assert answer.completion.finish_reason == 1


async def test_an_answer_that_its_first_token_completes_is_not_replayed_for_a_failed_decode_leg(
    model: Path, fleet: Fleet
) -> None:
    fleet.decode.failures = [TransferFailedError("no KV came")]
    fleet.prefill.prefill_s = 0.2  # decode has failed by then, and prefill is asked for the cause
    async with running(*fleet.workers), router(model, fleet.workers, culprit_grace_s="20") as one:
        answer = await collect(one.stub.Generate(request(stop=["t"])))
    assert answer.completion.finish_reason == common_pb2.FINISH_REASON_STOP
    assert (answer.token_ids, answer.text) == ([answer_token(0, 0)], "")
    assert answer.completion.attempt_count == 1


async def test_prefill_dying_after_the_hand_over_does_no_harm(model: Path, fleet: Fleet) -> None:
    fleet.prefill.hold_open_s = 30
    fleet.decode.token_s = 0.02
    async with running(*fleet.workers), router(model, fleet.workers) as served:
        reading = asyncio.create_task(collect(served.stub.Generate(request(max_tokens=12))))
        await eventually(lambda: fleet.decode.emitted > 2)
        await fleet.prefill.stop()
        answer = await reading
    assert answer.token_ids == [answer_token(0, index) for index in range(12)]
    assert answer.completion.attempt_count == 1


@pytest.mark.parametrize("role", ["encoder", "prefill", "decode"])
async def test_a_worker_that_falls_silent_is_given_up_and_its_request_moves(
    model: Path, fleet: Fleet, role: str
) -> None:
    """As a stopped process: connections stay up, nothing is ever answered."""
    kinds = {"encoder": FakeEncoder, "prefill": FakePrefill, "decode": FakeDecode}
    hung, other = getattr(fleet, role), kinds[role](fleet.fabric)
    setattr(hung, {"encoder": "encode_s", "prefill": "prefill_s", "decode": "token_s"}[role], 120.0)
    workers = [*fleet.workers, other]
    async with running(*workers), router(model, workers, worker_silence_s="1") as served:
        for attempt in range(50):  # chance and content pick the worker
            message = request("hi", [bytes([attempt])])
            call = asyncio.create_task(collect(served.stub.Generate(message)))
            if await _is_reached(hung, call):
                break
        hung.alive.clear()
        answer = await asyncio.wait_for(call, 30)
    assert answer.token_ids == [answer_token(0, index) for index in range(8)]
    assert answer.completion.attempt_count == 2


async def _is_reached(worker: FakeWorker, call: "asyncio.Task[Answer]") -> bool:
    """True when the request hangs at the worker, False when it has been answered."""
    while not call.done():
        if worker.open_calls:
            return True
        await asyncio.sleep(0.005)
    return False
