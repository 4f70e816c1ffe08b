"""Lists of any length fit into a message; what is too long is refused before it is read."""

import json
from pathlib import Path
from typing import Any

import pytest
from tritonclient.grpc import service_pb2

from epd.errors import InvalidRequestError
from epd.rpc.status import error_from_rpc
from epd.v1 import common_pb2, router_pb2
from services.router.kserve.infer_request import INPUTS
from services.router.kserve.tensors import read_tensors
from tests.router.conftest import Fleet
from tests.router.harness import failure, request, router, running
from tests.router.test_http_bounds import error_of, exchange, post

LIMITS = {"max_list_items": "10", "max_text_chars": "100", "max_video_frames": "64"}
#: Reading one would tell that there is no such role.
MESSAGE = router_pb2.ChatMessage(role="robot")
EMPTY_VIDEO = router_pb2.ContentPart(video=common_pb2.Video(frames=[b""] * 4))


def _message(part: router_pb2.ContentPart, count: int) -> router_pb2.ChatMessage:
    return router_pb2.ChatMessage(role="robot", parts=[part] * count)


def _conversation(*messages: router_pb2.ChatMessage) -> dict[str, Any]:
    return {"conversation": router_pb2.Conversation(messages=messages)}


TOO_LONG: dict[str, tuple[dict[str, Any], str]] = {
    "messages": (_conversation(*[MESSAGE] * 11), "conversation.messages"),
    "parts": (
        _conversation(*[_message(router_pb2.ContentPart(text=""), 4)] * 3),
        "conversation.messages",
    ),
    "frames": (_conversation(_message(EMPTY_VIDEO, 3)), "conversation.messages"),
    "tokens": (
        {"token_prompt": router_pb2.TokenPrompt(token_ids=[10**9] * 101)},
        "token_prompt.token_ids",
    ),
    "stop tokens": (
        {"text_prompt": "hi", "sampling": common_pb2.SamplingParams(stop_token_ids=[1] * 11)},
        "sampling.stop_token_ids",
    ),
    "biased tokens": (
        {
            "text_prompt": "hi",
            "sampling": common_pb2.SamplingParams(logit_bias=dict.fromkeys(range(11), 1000.0)),
        },
        "sampling.logit_bias",
    ),
}


async def test_a_list_that_is_too_long_is_named_and_not_read(model: Path, fleet: Fleet) -> None:
    async with running(*fleet.workers), router(model, fleet.workers, **LIMITS) as served:
        for name, (fields, field) in TOO_LONG.items():
            call = served.stub.Generate(router_pb2.GenerateRequest(**fields))
            error = error_from_rpc(await failure(call))
            assert isinstance(error, InvalidRequestError), name
            assert (error.field, "at most" in error.message) == (field, True), name
    assert not sum(fleet.prefill.calls.values()) + sum(fleet.decode.calls.values())


async def test_http_has_the_same_bounds(model: Path, fleet: Fleet) -> None:
    said = {"role": "user", "content": "x"}
    many: list[tuple[dict[str, Any], str]] = [
        ({"messages": [said] * 11}, "messages"),
        ({"messages": [said], "stop_token_ids": [1] * 11}, "stop_token_ids"),
    ]
    settings = {**LIMITS, "model_name": "m"}
    async with running(*fleet.workers), router(model, fleet.workers, **settings) as served:
        for fields, param in many:
            body = json.dumps({"model": "m", "max_tokens": 2, **fields}).encode()
            status, _, answer = await exchange(served.http, post(body))
            assert (status, error_of(answer)["param"]) == (400, param)
        body = json.dumps({"model": "m", "max_tokens": 2, "messages": [said] * 10}).encode()
        assert (await exchange(served.http, post(body)))[0] == 200


async def test_lists_within_the_bounds_are_served(model: Path, fleet: Fleet) -> None:
    async with running(*fleet.workers), router(model, fleet.workers, **LIMITS) as served:
        asked = request("hi")
        asked.sampling.stop_token_ids.extend(range(90, 100))
        assert [_ async for _ in served.stub.Generate(asked)]


@pytest.mark.parametrize(
    ("tensor", "raw", "told"),
    [
        # Their product has so many digits that it would take minutes to multiply.
        ({"shape": [2**62] * 50_000}, b"\0\0\0\0", "50000 dimensions"),
        ({"shape": [100_000]}, b"\0\0\0\0" * 100_000, "more than"),
    ],
)
def test_a_kserve_tensor_of_absurd_shape_is_refused_unread(
    tensor: dict[str, Any], raw: bytes, told: str
) -> None:
    asked = service_pb2.ModelInferRequest(
        inputs=[
            service_pb2.ModelInferRequest.InferInputTensor(name="image", datatype="BYTES", **tensor)
        ],
        raw_input_contents=[raw],
    )
    with pytest.raises(InvalidRequestError, match=told):
        read_tensors(asked, INPUTS)
