"""Requests no client should send: refused with the right status, and no worker goes down."""

import grpc
import pytest

from epd.errors import InvalidRequestError
from epd.rpc.status import error_from_rpc
from epd.v1 import common_pb2
from tests.support.ask import ask, generate_request, greedy
from tests.support.reference import Question
from tests.support.tiny_model import VOCAB_SIZE

pytestmark = pytest.mark.timeout(600)

QUESTION = Question((), "where is the red circle")
EVERY_TOKEN = tuple(range(VOCAB_SIZE))


@pytest.mark.parametrize(
    ("field", "given"),
    [
        ("sampling.stop_token_ids", {"stop_token_ids": (VOCAB_SIZE,), "min_tokens": 2}),
        ("sampling.stop_token_ids", {"stop_token_ids": (2**32 - 1,)}),
        ("sampling.min_tokens", {"stop_token_ids": EVERY_TOKEN, "min_tokens": 2}),
        (
            "sampling.min_tokens",
            {"stop_token_ids": EVERY_TOKEN, "min_tokens": 2, "temperature": 1.0, "min_p": 0.5},
        ),
    ],
)
async def test_endings_that_leave_no_token_to_draw_are_refused_and_kill_no_engine(
    model, shared_fleets, open_channel, reference, field, given
):
    fleet = shared_fleets.get(model)
    channel = open_channel(fleet.router_address)
    sampling = common_pb2.SamplingParams(max_tokens=5, **given)
    with pytest.raises(grpc.aio.AioRpcError) as refusal:
        await ask(channel, generate_request(QUESTION, sampling))
    error = error_from_rpc(refusal.value)
    assert isinstance(error, InvalidRequestError)
    assert error.field == field
    answer = await ask(channel, generate_request(QUESTION, greedy(8)))
    assert answer.token_ids == reference.greedy(QUESTION, 8)
