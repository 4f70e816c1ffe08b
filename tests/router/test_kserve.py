"""Triton's own client, unmodified, gets over KServe v2 what gRPC clients get."""

import asyncio
import base64
import json
import queue
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc
from tritonclient.grpc import InferInput, InferRequestedOutput
from tritonclient.grpc.aio import InferenceServerClient
from tritonclient.utils import InferenceServerException

from epd.errors import InvalidRequestError
from epd.image_digest import image_digest
from epd.v1 import common_pb2, router_pb2
from tests.router.harness import eventually, router, running
from tests.support.answer import collect

MAX_TOKENS = 8
IMAGE = b"an image file"
#: Of one stream at once.
STREAM_REQUESTS = 2


@pytest.fixture
async def served(model, fleet):
    async with (
        running(*fleet.workers),
        router(
            model,
            fleet.workers,
            model_name="m",
            kserve="true",
            kserve_stream_requests=str(STREAM_REQUESTS),
        ) as found,
    ):
        yield found


@pytest.fixture
async def client(served):
    found = InferenceServerClient(served.address)
    yield found
    await found.close()


def tensor(name, *values):
    datatype, dtype = ("BOOL", bool) if isinstance(values[0], bool) else ("BYTES", np.object_)
    found = InferInput(name, [len(values)], datatype)
    found.set_data_from_numpy(np.array(values, dtype=dtype))
    return found


def inputs(text=b"hello", sampling=None, **others):
    given = {"max_tokens": MAX_TOKENS, "seed": 3, **(sampling or {})}
    tensors = [
        tensor("text_input", text),
        tensor("sampling_parameters", json.dumps(given).encode()),
    ]
    return [*tensors, *(tensor(name, value) for name, value in others.items())]


def value(result, name="text_output"):
    found = result.as_numpy(name)
    return None if found is None else found[0]


async def expected(served, text="hello"):
    sampling = common_pb2.SamplingParams(seed=3, max_tokens=MAX_TOKENS)
    request = router_pb2.GenerateRequest(text_prompt=text, sampling=sampling)
    return (await collect(served.stub.Generate(request))).text.encode()


async def stream(client, *requests):
    """Results and errors of requests sent over one stream."""

    async def asked():
        for request in requests:
            yield {"model_name": "m", **request}

    return [found async for found in client.stream_infer(asked())]


async def test_state_and_metadata(client):
    assert await client.is_server_live()
    assert await client.is_server_ready()
    assert await client.is_model_ready("m")
    assert not await client.is_model_ready("other")
    assert (await client.get_server_metadata()).name == "epd"
    metadata = await client.get_model_metadata("m")
    assert {tensor.name for tensor in metadata.inputs} >= {"text_input", "image", "stream"}
    assert metadata.outputs[0].name == "text_output"
    with pytest.raises(InferenceServerException, match="NOT_FOUND"):
        await client.get_model_metadata("other")
    with pytest.raises(InferenceServerException, match="UNIMPLEMENTED"):
        await client.get_model_config("m")


async def test_an_answer_is_the_one_that_grpc_gives(served, client):
    text = await expected(served)
    result = await client.infer(
        "m",
        inputs(
            exclude_input_in_output=True,
            return_finish_reason=True,
            return_num_input_tokens=True,
            return_num_output_tokens=True,
        ),
        request_id="mine",
    )
    assert value(result) == text
    assert value(result, "finish_reason") == b"length"
    assert (value(result, "num_input_tokens"), value(result, "num_output_tokens")) == (5, 8)
    assert result.get_response().id == "mine"
    plain = await client.infer("m", inputs(sampling={"temperature": "0.5", "stop": "zz"}))
    assert value(plain) == b"hello" + text, "the input comes first by default"
    assert value(plain, "finish_reason") is None


async def test_a_stream_has_a_response_per_delta_and_a_final_one(served, fleet, client):
    text = await expected(served)
    fleet.decode.token_s = 0.05
    request = {"inputs": inputs(stream=True, return_num_output_tokens=True), "request_id": "a"}
    results = await stream(client, request)
    assert [error for _, error in results] == [None] * len(results)
    assert len(results) > 3
    assert b"".join(value(result) for result, _ in results) == text
    assert sum(value(result, "num_output_tokens") for result, _ in results) == MAX_TOKENS
    final = [
        result.get_response().parameters["triton_final_response"].bool_param
        for result, _ in results
    ]
    assert final == [False] * (len(results) - 1) + [True]


async def test_requests_of_a_stream_run_side_by_side_and_fail_alone(served, fleet, client):
    text = await expected(served)
    side_by_side = asyncio.Event()
    at_once: list[int] = []

    async def before():
        at_once.append(fleet.decode.open_calls)
        if at_once[-1] == STREAM_REQUESTS:
            side_by_side.set()
        await asyncio.wait_for(side_by_side.wait(), 30)

    fleet.decode.before = before
    requests = [
        {"inputs": inputs(stream=True), "request_id": "a"},
        {"inputs": inputs(sampling={"temperature": -1}), "request_id": "bad"},
        {"inputs": inputs(exclude_input_in_output=True), "request_id": "b"},
        {"inputs": inputs(stream=True), "request_id": "c"},
    ]
    texts: dict[str, bytes] = {}
    errors = []
    for result, error in await stream(client, *requests):
        if error is not None:
            errors.append(str(error))
        else:
            key = result.get_response().id
            texts[key] = texts.get(key, b"") + value(result)
    assert texts == dict.fromkeys("abc", text)
    assert max(at_once) == STREAM_REQUESTS
    assert len(errors) == 1
    assert "INVALID_ARGUMENT" in errors[0]
    assert "temperature" in errors[0]


def test_the_callback_client_with_final_responses_works_too(model, fleet):
    """The client that load generators use."""
    answers: queue.Queue[Any] = queue.Queue()

    def drive(address):
        with tritonclient.grpc.InferenceServerClient(address) as client:
            client.start_stream(lambda result, error: answers.put((result, error)))
            client.async_stream_infer("m", inputs(stream=True), enable_empty_final_response=True)
            final = False
            while not final:
                result, error = answers.get(timeout=60)
                assert error is None
                final = result.get_response().parameters["triton_final_response"].bool_param
            client.stop_stream()

    async def run():
        async with (
            running(*fleet.workers),
            router(model, fleet.workers, model_name="m", kserve="true") as served,
        ):
            await asyncio.to_thread(drive, served.address)

    asyncio.run(run())


async def test_images_reach_the_encoder(fleet, client):
    image = base64.b64encode(IMAGE)
    await client.infer("m", inputs(image=image))
    assert fleet.encoder.seen == [image_digest("d1", "p1", IMAGE)]
    await eventually(lambda: not fleet.encoder.held)


@pytest.mark.parametrize(
    ("given", "fields", "named"),
    [
        ([tensor("text_input", b"x"), tensor("bad_words", b"x")], {}, "inputs.bad_words"),
        ([tensor("stream", True)], {}, "inputs.text_input"),
        ([tensor("text_input", b"x", b"y")], {}, "inputs.text_input"),
        ([tensor("text_input", True)], {}, "inputs.text_input"),
        ([tensor("text_input", b"\xff")], {}, "inputs.text_input"),
        (inputs(image=b"???"), {}, "inputs.image"),
        (inputs(stream=True), {}, "inputs.stream"),
        (inputs(sampling={"best_of": 2}), {}, "inputs.sampling_parameters.best_of"),
        (inputs(sampling={"n": 2}), {}, "inputs.sampling_parameters.n"),
        (inputs(), {"outputs": [InferRequestedOutput("logits")]}, "outputs.logits"),
        (inputs(), {"sequence_id": 7}, "parameters.sequence"),
        (inputs(), {"model_version": "2"}, "version"),
    ],
)
async def test_what_is_not_understood_is_refused_by_name(client, fleet, given, fields, named):
    with pytest.raises(InferenceServerException) as refused:
        await client.infer("m", given, **fields)
    assert named in str(refused.value)
    assert fleet.prefill.calls["Prefill"] == 0


async def test_a_stream_that_is_closed_ends_every_leg(fleet, client):
    fleet.decode.token_s = 0.02

    async def asked():
        yield {"model_name": "m", "inputs": inputs(stream=True, sampling={"max_tokens": 400})}
        await asyncio.sleep(60)

    results = client.stream_infer(asked())
    await anext(aiter(results))
    results.cancel()
    await eventually(lambda: fleet.decode.open_calls == fleet.prefill.open_calls == 0)
    assert fleet.decode.emitted < 390, "it ended by itself"


async def test_a_workers_refusal_has_its_status(fleet, client):
    fleet.prefill.failures = [InvalidRequestError("not this one", field="x")]
    with pytest.raises(InferenceServerException, match="not this one") as refused:
        await client.infer("m", inputs())
    assert refused.value.status() == "StatusCode.INVALID_ARGUMENT"


async def test_without_the_setting_there_is_no_such_service(model, fleet):
    async with running(*fleet.workers), router(model, fleet.workers, model_name="m") as served:
        client = InferenceServerClient(served.address)
        with pytest.raises(InferenceServerException, match="UNIMPLEMENTED"):
            await client.is_server_live()
        await client.close()
