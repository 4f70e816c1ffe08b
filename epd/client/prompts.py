"""What can be asked: text, messages with images and videos, raw text, tokens."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from epd.v1 import common_pb2, router_pb2


@dataclass(frozen=True)
class Image:
    """An image file's bytes: PNG, JPEG, WebP, GIF, TIFF or BMP."""

    data: bytes

    @classmethod
    def of(cls, source: "Image | bytes | Path") -> "Image":
        """From bytes or a path; a path is read here.

        Raises:
            OSError: the file cannot be read.
        """
        if isinstance(source, Image):
            return source
        return cls(source if isinstance(source, bytes) else source.read_bytes())


@dataclass(frozen=True)
class ImageUrl:
    """An image that the router downloads, where its operator allows the host; https."""

    url: str


@dataclass(frozen=True)
class Video:
    """Frames in order, image files of one size, and when each is shown, in seconds."""

    frames: Sequence[Image | bytes | Path]
    timestamps_s: Sequence[float]


Content = str | Image | ImageUrl | Video


@dataclass(frozen=True)
class Message:
    """One message; ``role`` is system, user or assistant."""

    role: str
    content: str | Sequence[Content]


@dataclass(frozen=True)
class RawText:
    """A prompt that is taken as it is, without chat template."""

    text: str


@dataclass(frozen=True)
class Tokens:
    """A prompt given as token ids."""

    token_ids: Sequence[int]


Prompt = str | Sequence[Message] | RawText | Tokens

ImageSource = Image | bytes | Path


def conversation(
    prompt: str | Sequence[Message], images: Sequence[ImageSource]
) -> router_pb2.Conversation:
    """The wire form; images go before a prompt that is a text.

    Raises:
        ValueError: images beside messages.
        OSError: an image file cannot be read.
    """
    if isinstance(prompt, str):
        content: list[Content] = [*(Image.of(image) for image in images), prompt]
        prompt = [Message("user", content)]
    else:
        refuse_images(images)
    return router_pb2.Conversation(messages=[_message(message) for message in prompt])


def refuse_images(images: Sequence[object]) -> None:
    """Raises ValueError when there are images where none can be."""
    if images:
        raise ValueError("images go with a text or inside messages")


def _message(message: Message) -> router_pb2.ChatMessage:
    content = [message.content] if isinstance(message.content, str) else message.content
    return router_pb2.ChatMessage(
        role=message.role,
        parts=[_part(part) for part in content],
    )


def _part(part: Content) -> router_pb2.ContentPart:
    match part:
        case str():
            return router_pb2.ContentPart(text=part)
        case Image():
            return router_pb2.ContentPart(image=part.data)
        case ImageUrl():
            return router_pb2.ContentPart(image_url=part.url)
        case Video():
            frames = [Image.of(frame).data for frame in part.frames]
            video = common_pb2.Video(frames=frames, timestamps_s=part.timestamps_s)
            return router_pb2.ContentPart(video=video)
