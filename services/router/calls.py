"""What a client asks for and what it gets, free of the wire."""

from dataclasses import dataclass
from typing import NamedTuple, TypeVar

from epd.media import Media, Video
from epd.sampling import FinishReason, SamplingParams, TopLogprobs
from services.router.api_keys import ANONYMOUS
from services.router.waiting_line import Priority

ROLES = frozenset({"system", "user", "assistant"})


@dataclass(frozen=True)
class TextPart:
    """Text of a message."""

    text: str


@dataclass(frozen=True)
class ImagePart:
    """An image file of a message."""

    data: bytes


@dataclass(frozen=True)
class ImageUrlPart:
    """An image that is still to be downloaded; ``field`` is the URL's path in the request."""

    url: str
    field: str


@dataclass(frozen=True)
class VideoPart:
    """A video of a message; ``field`` is its path in the request."""

    video: Video
    field: str


Part = TextPart | ImagePart | ImageUrlPart | VideoPart
P = TypeVar("P", bound=Part)


@dataclass(frozen=True)
class ToolCall:
    """A call that the assistant has made; ``arguments`` is the JSON text of an object."""

    call_id: str
    name: str
    arguments: str


@dataclass(frozen=True)
class Message:
    """One message of a conversation.

    ``role`` is one of :data:`ROLES`, or ``tool`` for the result of the call ``answers_call``.
    """

    role: str
    parts: tuple[Part, ...]
    tool_calls: tuple[ToolCall, ...] = ()
    answers_call: str = ""


@dataclass(frozen=True)
class Tool:
    """A function that the assistant may call; ``definition`` is OpenAI's JSON text of it."""

    name: str
    definition: str


@dataclass(frozen=True)
class Conversation:
    """Messages to be rendered with the model's chat template, and the tools that it is told of."""

    messages: tuple[Message, ...]
    tools: tuple[Tool, ...] = ()

    @property
    def images(self) -> list[Media]:
        """All image files and videos, in the order of the prompt."""
        return [
            part.video if isinstance(part, VideoPart) else part.data
            for message in self.messages
            for part in message.parts
            if isinstance(part, ImagePart | VideoPart)
        ]

    @property
    def videos(self) -> list[VideoPart]:
        """All videos, in the order of the prompt."""
        return self._parts(VideoPart)

    @property
    def image_urls(self) -> list[ImageUrlPart]:
        """All images that are to be downloaded, in the order of the prompt."""
        return self._parts(ImageUrlPart)

    @property
    def text_chars(self) -> int:
        """Characters of everything that is not an image."""
        return (
            sum(len(part.text) for part in self._parts(TextPart))
            + sum(
                len(call.name) + len(call.arguments)
                for message in self.messages
                for call in message.tool_calls
            )
            + sum(len(tool.definition) for tool in self.tools)
        )

    def _parts(self, kind: type[P]) -> list[P]:
        """All parts of a kind, in the order of the prompt."""
        return [
            part for message in self.messages for part in message.parts if isinstance(part, kind)
        ]


@dataclass(frozen=True)
class TextPrompt:
    """Raw text, without chat template. Control-token spellings in it are ordinary characters."""

    text: str


@dataclass(frozen=True)
class TokenPrompt:
    """Tokens, taken as they are."""

    token_ids: tuple[int, ...]


PromptInput = Conversation | TextPrompt | TokenPrompt


@dataclass(frozen=True)
class GenerateCall:
    """A request for an answer; ``sampling.seed`` is always set, ``request_id`` never empty.

    ``client`` is the name of the caller's API key, empty where none are used.
    """

    request_id: str
    model: str
    prompt: PromptInput
    sampling: SamplingParams
    stop: tuple[str, ...] = ()
    logprobs: bool = False
    priority: Priority = Priority.NORMAL
    client: str = ANONYMOUS


class Delta(NamedTuple):
    """New tokens, the text that is now certain, and a log probability per token.

    ``top_logprobs``: one per token when asked for, else none.
    """

    token_ids: list[int]
    text: str
    logprobs: list[float]
    top_logprobs: list[TopLogprobs]


@dataclass(frozen=True)
class Usage:
    """Token counts; ``image_tokens`` and ``cached_tokens`` are part of ``prompt_tokens``."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    image_tokens: int


@dataclass(frozen=True)
class Completion:
    """The end of an answer. ``timings_ns`` are non-overlapping stages of the critical path."""

    finish_reason: FinishReason
    usage: Usage
    timings_ns: dict[str, int]
    ttft_ns: int
    request_id: str
    attempt_count: int
