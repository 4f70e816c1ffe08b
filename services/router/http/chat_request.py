"""A chat completion request, read from JSON."""

from dataclasses import dataclass
from typing import Any

from epd.errors import InvalidRequestError, UnsupportedFeatureError
from epd.sampling import SamplingParams
from services.router.calls import (
    ROLES,
    Conversation,
    Message,
    Part,
    TextPart,
)
from services.router.http.fields import Fields
from services.router.http.frame_times import FrameTimes, read_media_io
from services.router.http.media_parts import read_image, read_video
from services.router.http.sampling_fields import read_choice_count, read_sampling, read_stop
from services.router.http.stream_options import StreamOptions, read_stream_options
from services.router.http.tool_fields import (
    read_stop_after_call,
    read_tool_calls,
    read_tool_use,
)
from services.router.http.tool_use import ToolUse

#: Newer names of roles that chat templates know by another one.
_ROLE_ALIASES = {"developer": "system"}
#: Has the result of a call; over gRPC there are no tools.
_TOOL_ROLE = "tool"


@dataclass(frozen=True)
class ChatRequest:
    """What a client asks for; ``stream`` is None for one answer in one piece."""

    model: str
    conversation: Conversation
    sampling: SamplingParams
    stop: tuple[str, ...]
    logprobs: bool
    choice_count: int
    stream: StreamOptions | None
    tool_use: ToolUse


def read_chat_request(
    body: Any,
    default_max_tokens: int,
    max_choices: int,
    max_video_frames: int,
    tool_parser: str,
) -> ChatRequest:
    """The checked request.

    Args:
        body: Decoded JSON.
        default_max_tokens: What a request without a limit gets.
        max_choices: Most answers to one request.
        max_video_frames: Most frames of a video.
        tool_parser: What reads answers with tool calls.

    Raises:
        InvalidRequestError: a field has no valid value.
        UnsupportedFeatureError: a field, or a value of one, that is not supported.
    """
    fields = Fields(body)
    logprobs = fields.flag("logprobs")
    top_logprobs = fields.integer("top_logprobs") or 0
    if top_logprobs and not logprobs:
        raise InvalidRequestError("needs logprobs to be true", field="top_logprobs")
    old_limit = fields.integer("max_tokens")
    limit = fields.integer("max_completion_tokens")
    if limit is None:
        limit = default_max_tokens if old_limit is None else old_limit
    tool_use = read_tool_use(fields, tool_parser)
    sampling = read_sampling(fields, max_tokens=limit, top_logprobs=top_logprobs)
    media = _MediaRules(read_media_io(fields), max_video_frames)
    messages = tuple(_message(message, media) for message in fields.objects("messages"))
    request = ChatRequest(
        model=fields.required_text("model"),
        conversation=Conversation(messages, tool_use.tools),
        sampling=tool_use.constrained(sampling),
        stop=read_stop(fields) + read_stop_after_call(fields, tool_use),
        logprobs=logprobs,
        choice_count=read_choice_count(fields, max_choices),
        stream=read_stream_options(fields),
        tool_use=tool_use,
    )
    fields.only("store", False)
    fields.only("service_tier", "auto", "default")
    fields.only("modalities", ["text"])
    fields.finish()
    return request


@dataclass(frozen=True)
class _MediaRules:
    """What holds for all videos of a request."""

    frame_times: FrameTimes
    max_video_frames: int


def _message(fields: Fields, media: _MediaRules) -> Message:
    role = fields.required_text("role")
    role = _ROLE_ALIASES.get(role, role)
    known = ROLES | {_TOOL_ROLE}
    if role not in known:
        raise InvalidRequestError(
            f"role is {role!r}, known are {', '.join(sorted(known))}", field=fields.name("role")
        )
    calls = read_tool_calls(fields) if role == "assistant" else ()
    answers = fields.required_text("tool_call_id") if role == _TOOL_ROLE else ""
    content = fields.take("content")
    if content is None and calls:
        content = ""
    message = Message(role, _parts(content, fields.name("content"), media), calls, answers)
    fields.finish()
    return message


def _parts(content: Any, path: str, media: _MediaRules) -> tuple[Part, ...]:
    if isinstance(content, str):
        return (TextPart(content),)
    if not isinstance(content, list):
        raise InvalidRequestError("expected a string or an array of parts", field=path)
    return tuple(
        _part(Fields(part, f"{path}[{index}]"), media) for index, part in enumerate(content)
    )


def _part(fields: Fields, media: _MediaRules) -> Part:
    kind = fields.required_text("type")
    part: Part
    match kind:
        case "text":
            part = TextPart(fields.required_text("text"))
        case "image_url":
            part = read_image(fields)
        case "video_url":
            part = read_video(fields, media.frame_times, media.max_video_frames)
        case _:
            raise UnsupportedFeatureError(
                f"parts of type {kind[:32]!r} are not supported",
                reason="UNSUPPORTED_VALUE",
                metadata={"field": fields.name("type")},
            )
    fields.finish()
    return part
