"""A chat completion request, read from JSON."""

import base64
import binascii
from dataclasses import dataclass
from typing import Any

from epd.errors import InvalidRequestError, UnsupportedFeatureError
from epd.sampling import SamplingParams
from services.router.calls import ROLES, Conversation, ImagePart, Message, TextPart
from services.router.http.fields import Fields
from services.router.http.sampling_fields import read_choice_count, read_sampling, read_stop
from services.router.http.stream_options import StreamOptions, read_stream_options

#: Newer names of roles that chat templates know by another one.
_ROLE_ALIASES = {"developer": "system"}


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


def read_chat_request(body: Any, default_max_tokens: int, max_choices: int) -> ChatRequest:
    """The checked request.

    Args:
        body: Decoded JSON.
        default_max_tokens: What a request without a limit gets.
        max_choices: Most answers to one request.

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
    request = ChatRequest(
        model=fields.required_text("model"),
        conversation=Conversation(tuple(map(_message, fields.objects("messages")))),
        sampling=read_sampling(fields, max_tokens=limit, top_logprobs=top_logprobs),
        stop=read_stop(fields),
        logprobs=logprobs,
        choice_count=read_choice_count(fields, max_choices),
        stream=read_stream_options(fields),
    )
    fields.only("store", False)
    fields.only("service_tier", "auto", "default")
    fields.only("modalities", ["text"])
    fields.finish()
    return request


def _message(fields: Fields) -> Message:
    role = fields.required_text("role")
    role = _ROLE_ALIASES.get(role, role)
    if role not in ROLES:
        raise InvalidRequestError(
            f"role is {role!r}, known are {', '.join(sorted(ROLES))}", field=fields.name("role")
        )
    content = fields.take("content")
    message = Message(role, _parts(content, fields.name("content")))
    fields.finish()
    return message


def _parts(content: Any, path: str) -> tuple[TextPart | ImagePart, ...]:
    if isinstance(content, str):
        return (TextPart(content),)
    if not isinstance(content, list):
        raise InvalidRequestError("expected a string or an array of parts", field=path)
    return tuple(_part(Fields(part, f"{path}[{index}]")) for index, part in enumerate(content))


def _part(fields: Fields) -> TextPart | ImagePart:
    kind = fields.required_text("type")
    part: TextPart | ImagePart
    match kind:
        case "text":
            part = TextPart(fields.required_text("text"))
        case "image_url":
            part = _image(fields)
        case _:
            raise UnsupportedFeatureError(
                f"parts of type {kind[:32]!r} are not supported",
                reason="UNSUPPORTED_VALUE",
                metadata={"field": fields.name("type")},
            )
    fields.finish()
    return part


def _image(part: Fields) -> ImagePart:
    fields = part.object("image_url")
    if fields is None:
        raise InvalidRequestError("missing", field=part.name("image_url"), reason="MISSING_FIELD")
    url = fields.required_text("url")
    # The model sees every image as its processor makes it: there is no low detail.
    fields.only("detail", "auto", "high")
    fields.finish()
    return ImagePart(_data_of(url, fields.name("url")))


def _data_of(url: str, path: str) -> bytes:
    head, comma, payload = url.partition(",")
    if not head.startswith("data:") or not comma:
        raise UnsupportedFeatureError(
            "images are taken as data URLs only",
            reason="UNSUPPORTED_VALUE",
            metadata={"field": path},
        )
    if not head.startswith("data:image/") or not head.endswith(";base64"):
        raise InvalidRequestError("expected data:image/...;base64,", field=path)
    try:
        return base64.b64decode(payload, validate=True)
    except binascii.Error as error:
        raise InvalidRequestError("not valid base64", field=path) from error
