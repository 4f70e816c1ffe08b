"""Unified workers serve a request alone."""

from pathlib import Path

import grpc
import pytest

from epd.v1 import common_pb2, router_pb2
from tests.router.fake_workers import FakeDecode, FakePrefill, answer_token
from tests.router.harness import failure, request, router, running
from tests.router.model_folder import IMAGE
from tests.support.answer import collect


@pytest.mark.parametrize("mode", ["null", "auto"])
async def test_a_unified_worker_gets_the_unexpanded_prompt_and_the_image_files(
    model: Path, mode: str
) -> None:
    worker = FakeDecode(unified=True)
    async with running(worker), router(model, [worker], disaggregation_mode=mode) as served:
        answer = await collect(served.stub.Generate(request("hi", [b"one", b"two"], seed=2)))
    assert answer.token_ids == [answer_token(2, index) for index in range(8)]
    (call,) = worker.requests
    anchors = [index for index, token in enumerate(call.token_ids) if token == IMAGE]
    assert [image.anchor_index for image in call.local.images] == anchors
    assert [image.data for image in call.local.images] == [b"one", b"two"]
    assert answer.completion.usage.prompt_tokens == 7
    assert answer.completion.usage.image_tokens == 5


async def test_an_answer_that_ends_at_a_stop_string_reports_its_prompt_too(model: Path) -> None:
    worker = FakeDecode(unified=True)
    async with running(worker), router(model, [worker], disaggregation_mode="null") as served:
        answer = await collect(served.stub.Generate(request("hi", stop=["q"])))
    assert answer.completion.finish_reason == common_pb2.FINISH_REASON_STOP
    assert answer.completion.usage.prompt_tokens == 7
    assert answer.completion.usage.image_tokens == 5


async def test_an_answer_moves_to_another_unified_worker_without_a_gap(model: Path) -> None:
    workers = [FakeDecode(unified=True), FakeDecode(unified=True)]
    for worker in workers:
        worker.die_at = 5
    async with running(*workers), router(model, workers) as served:
        answer = await collect(served.stub.Generate(request(max_tokens=12)))
    assert answer.token_ids == [answer_token(0, index) for index in range(12)]
    assert sorted(len(worker.requests) for worker in workers) == [1, 1] or (
        answer.completion.attempt_count == 3
    )


async def test_workers_that_are_not_unified_get_no_request_alone(model: Path) -> None:
    worker = FakeDecode()
    settings = {"disaggregation_mode": "null", "worker_wait_s": "0.1"}
    async with running(worker), router(model, [worker], **settings) as served:
        error = await failure(served.stub.Generate(request()))
    assert error.code() is grpc.StatusCode.UNAVAILABLE


async def test_always_leaves_unified_workers_alone_where_others_are(model: Path) -> None:
    unified, prefill = FakeDecode(unified=True), FakePrefill()
    apart = FakeDecode(prefill.fabric)
    workers = [unified, prefill, apart]
    for worker in workers:
        worker.info.accepts_images = False
    settings = {"disaggregation_mode": "always"}
    async with running(*workers), router(model, workers, **settings) as served:
        for _ in range(5):
            await collect(served.stub.Generate(request()))
    assert (unified.calls["Decode"], apart.calls["Decode"]) == (0, 5)


async def test_images_cannot_be_counted_without_an_encoder(model: Path) -> None:
    worker = FakeDecode(unified=True)
    async with running(worker), router(model, [worker]) as served:
        conversation = request("hi", [b"one"]).conversation
        with pytest.raises(grpc.aio.AioRpcError) as raised:
            await served.stub.CountTokens(router_pb2.CountTokensRequest(conversation=conversation))
    assert raised.value.code() is grpc.StatusCode.UNIMPLEMENTED
