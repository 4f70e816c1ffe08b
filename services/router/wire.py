"""Client-facing messages to and from the router's own types."""

import dataclasses
import secrets
from collections.abc import Iterable

from epd.errors import InvalidRequestError
from epd.rpc.request_context import MAX_ID_LENGTH, is_request_id, new_id
from epd.v1 import common_pb2, router_pb2
from epd.wire.finish_reason import finish_reason_to_proto
from epd.wire.media import video_from_proto
from epd.wire.sampling import sampling_from_proto
from epd.wire.timings import timings_to_proto
from epd.wire.top_logprobs import top_to_proto
from services.router.calls import (
    ROLES,
    Completion,
    Conversation,
    Delta,
    GenerateCall,
    ImagePart,
    ImageUrlPart,
    Message,
    Part,
    PromptInput,
    TextPart,
    TextPrompt,
    TokenPrompt,
    VideoPart,
)
from services.router.limits import RequestLimits
from services.router.waiting_line import Priority
from services.router.workers import ServedModel, WorkerState

#: Seeds fit a signed 64-bit number, which is what many clients can write.
_SEED_BITS = 63


def call_from_proto(request: router_pb2.GenerateRequest, client: str) -> GenerateCall:
    """The checked request; mints id and seed where the client gives none.

    Raises:
        InvalidRequestError: a field has no valid value.
    """
    if request.request_id and not is_request_id(request.request_id):
        raise InvalidRequestError(
            f"request_id has {len(request.request_id)} characters, allowed are {MAX_ID_LENGTH} "
            "that can be printed",
            field="request_id",
        )
    sampling = sampling_from_proto(request.sampling)
    if not request.sampling.HasField("seed"):
        sampling = dataclasses.replace(sampling, seed=secrets.randbits(_SEED_BITS))
    return GenerateCall(
        request_id=request.request_id or new_id(),
        model=request.model,
        prompt=prompt_from_proto(request),
        sampling=sampling,
        stop=tuple(request.stop),
        logprobs=request.logprobs,
        priority=_priority(request.priority),
        client=client,
    )


def check_lists(
    request: router_pb2.GenerateRequest | router_pb2.CountTokensRequest, limits: RequestLimits
) -> None:
    """Refuses lists that are far too long before the event loop's time goes into reading them.

    Raises:
        InvalidRequestError: names the list.
    """
    messages = request.conversation.messages
    limits.check_messages(messages)
    parts = (part for message in messages for part in message.parts)
    videos = [part.video for part in parts if part.HasField("video")]
    limits.check_items("conversation.messages", sum(len(video.frames) for video in videos))
    limits.check_items("conversation.messages", sum(len(video.timestamps_s) for video in videos))
    if isinstance(request, router_pb2.GenerateRequest):
        limits.check_tokens(len(request.token_prompt.token_ids))
        limits.check_items("sampling.stop_token_ids", len(request.sampling.stop_token_ids))
        limits.check_items("sampling.logit_bias", len(request.sampling.logit_bias))
        limits.check_stop(request.stop)


def _priority(value: router_pb2.Priority) -> Priority:
    known = {
        router_pb2.PRIORITY_UNSPECIFIED: Priority.NORMAL,
        router_pb2.PRIORITY_HIGH: Priority.HIGH,
        router_pb2.PRIORITY_LOW: Priority.LOW,
    }
    if value not in known:
        raise InvalidRequestError(f"priority {value} is not known", field="priority")
    return known[value]


def prompt_from_proto(
    request: router_pb2.GenerateRequest | router_pb2.CountTokensRequest,
) -> PromptInput:
    """The input of a request.

    Raises:
        InvalidRequestError: none is set, or a message is malformed.
    """
    match request.WhichOneof("input"):
        case "conversation":
            return Conversation(tuple(_messages(request.conversation.messages)))
        case "text_prompt":
            return TextPrompt(request.text_prompt)
        case "token_prompt":
            assert isinstance(request, router_pb2.GenerateRequest)
            return TokenPrompt(tuple(request.token_prompt.token_ids))
        case _:
            raise InvalidRequestError(
                "one of conversation, token_prompt and text_prompt must be set", field="input"
            )


def delta_to_proto(delta: Delta, with_logprobs: bool) -> router_pb2.GenerateResponse:
    """An event with new tokens."""
    response = router_pb2.GenerateResponse()
    # Filled in place: a message given to a constructor is copied by way of its bytes.
    filled = response.delta
    filled.token_ids.extend(delta.token_ids)
    filled.text = delta.text
    if with_logprobs:
        filled.logprobs.extend(delta.logprobs)
    if delta.top_logprobs:
        filled.top_logprobs.extend(map(top_to_proto, delta.top_logprobs))
    return response


def completion_to_proto(completion: Completion) -> router_pb2.GenerateResponse:
    """The last event."""
    usage = completion.usage
    return router_pb2.GenerateResponse(
        completion=router_pb2.Completion(
            finish_reason=finish_reason_to_proto(completion.finish_reason),
            usage=common_pb2.Usage(
                prompt_tokens=usage.prompt_tokens,
                completion_tokens=usage.completion_tokens,
                cached_tokens=usage.cached_tokens,
                image_tokens=usage.image_tokens,
            ),
            timings=timings_to_proto(completion.timings_ns),
            ttft_ns=completion.ttft_ns,
            request_id=completion.request_id,
            attempt_count=completion.attempt_count,
        )
    )


def model_to_proto(
    model: ServedModel | None, max_images: int, workers: Iterable[WorkerState]
) -> router_pb2.GetModelResponse:
    """The answer of GetModel; without a model only the workers are in it."""
    response = router_pb2.GetModelResponse(
        workers=[
            router_pb2.WorkerStatus(
                role=worker.role.value,
                address=worker.address,
                instance_id=worker.instance_id,
                healthy=not worker.reason,
                in_flight=worker.in_flight,
                reason=worker.reason,
            )
            for worker in workers
        ]
    )
    if model is not None:
        response.model_name = model.name
        response.model_digest = model.digest
        response.context_length = model.context_length
        response.accepts_images = model.accepts_images
        response.max_images = max_images
    return response


def _messages(messages: Iterable[router_pb2.ChatMessage]) -> Iterable[Message]:
    for index, message in enumerate(messages):
        field = f"conversation.messages[{index}]"
        if message.role not in ROLES:
            raise InvalidRequestError(
                f"role is {message.role!r}, known are {', '.join(sorted(ROLES))}",
                field=f"{field}.role",
            )
        yield Message(message.role, tuple(_parts(message.parts, field)))


def _parts(parts: Iterable[router_pb2.ContentPart], field: str) -> Iterable[Part]:
    for index, part in enumerate(parts):
        match part.WhichOneof("part"):
            case "text":
                yield TextPart(part.text)
            case "image":
                yield ImagePart(part.image)
            case "video":
                yield VideoPart(video_from_proto(part.video), f"{field}.parts[{index}].video")
            case "image_url":
                yield ImageUrlPart(part.image_url, f"{field}.parts[{index}].image_url")
            case _:
                raise InvalidRequestError(
                    "none of text, image, image_url and video is set",
                    field=f"{field}.parts[{index}]",
                )
