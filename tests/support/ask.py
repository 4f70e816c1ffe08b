"""Asks the router of a running fleet, the way any gRPC client would."""

from collections.abc import Mapping

import grpc

from epd.v1 import common_pb2, router_pb2, router_pb2_grpc
from epd.wire.media import media_fields
from tests.support.answer import Answer, collect
from tests.support.reference import Question


def generate_request(
    question: Question, sampling: common_pb2.SamplingParams, request_id: str = ""
) -> router_pb2.GenerateRequest:
    """The question as one user turn, images first, then videos."""
    parts = [router_pb2.ContentPart(image=data) for data in question.images]
    parts += [router_pb2.ContentPart(**media_fields(video)) for video in question.videos]
    parts.append(router_pb2.ContentPart(text=question.text))
    turn = router_pb2.ChatMessage(role="user", parts=parts)
    return router_pb2.GenerateRequest(
        request_id=request_id,
        conversation=router_pb2.Conversation(messages=[turn]),
        sampling=sampling,
    )


async def ask(
    channel: grpc.aio.Channel,
    request: router_pb2.GenerateRequest,
    *,
    timeout_s: float = 200.0,
    metadata: Mapping[str, str] | None = None,
) -> Answer:
    """The whole answer. Raises grpc.aio.AioRpcError."""
    call = router_pb2_grpc.RouterServiceStub(channel).Generate(
        request, timeout=timeout_s, metadata=tuple((metadata or {}).items())
    )
    return await collect(call)


def greedy(max_tokens: int) -> common_pb2.SamplingParams:
    """Greedy, past any end token."""
    return common_pb2.SamplingParams(max_tokens=max_tokens, ignore_eos=True)


def seeded(max_tokens: int, seed: int) -> common_pb2.SamplingParams:
    """Drawn with every filter, penalty and bias on, past any end token."""
    return common_pb2.SamplingParams(
        max_tokens=max_tokens,
        ignore_eos=True,
        temperature=0.9,
        top_k=40,
        top_p=0.95,
        min_p=0.01,
        frequency_penalty=0.4,
        presence_penalty=0.3,
        repetition_penalty=1.1,
        logit_bias={65: 2.0, 66: -3.0},
        top_logprobs=2,
        seed=seed,
    )
