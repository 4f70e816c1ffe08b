"""From what the client sent to prompt tokens, one anchor token standing for each image."""

import asyncio
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from epd.errors import InvalidRequestError, UnavailableError
from epd.image_digest import media_digest
from epd.image_size import estimated_pixels
from epd.media import Media, media_files
from epd.text.chat_template import ChatTemplate, require_template
from epd.text.guarded_text import ControlTokenGuard
from epd.text.tokenizer import Tokenizer
from services.router.calls import (
    Conversation,
    Part,
    PromptInput,
    TextPart,
    TextPrompt,
    VideoPart,
)
from services.router.limits import RequestLimits
from services.router.tool_prompt import require_tools, template_tools, tool_fields, tool_texts
from services.router.workers import ServedModel


@dataclass(frozen=True)
class SourceImage:
    """An image or video of the request: place, files, content digest (32 bytes), rough size."""

    index: int
    data: Media
    digest: bytes
    pixels: int


@dataclass(frozen=True)
class Prompt:
    """Prompt tokens before placeholders are expanded, and the images in their order.

    ``processor_digest`` is part of the images' digests: only encoders that have it know them.
    """

    token_ids: tuple[int, ...]
    images: tuple[SourceImage, ...] = ()
    processor_digest: str = ""


class PromptBuilder:
    """Renders, tokenises and hashes on its own threads: a long prompt must not stop the loop.

    Text of the client never becomes a control token (see :mod:`epd.text.guarded_text`); only a
    token prompt can carry one.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        template: ChatTemplate | None,
        limits: RequestLimits,
        threads: int,
    ) -> None:
        self._tokenizer = tokenizer
        self._template = template
        self._limits = limits
        self._executor = ThreadPoolExecutor(threads, thread_name_prefix="prompt")

    async def build(self, source: PromptInput, model: ServedModel) -> Prompt:
        """The prompt of a request.

        Raises:
            InvalidRequestError: out of bounds, or the template refuses it, or no token is left.
            UnsupportedFeatureError: images or a conversation for a model without.
            UnavailableError: images, and no encoder has been there yet.
        """
        self._limits.check_prompt(source, model)
        if isinstance(source, Conversation) and source.images and not model.processor_digest:
            raise UnavailableError(
                "no worker has said yet how images are read", reason="NO_ENCODER_WORKER"
            )
        loop = asyncio.get_running_loop()
        prompt = await loop.run_in_executor(self._executor, self._build, source, model)
        if not prompt.token_ids:
            raise InvalidRequestError("the prompt has no token", field="input")
        return prompt

    def close(self) -> None:
        """Lets the threads end."""
        self._executor.shutdown(wait=False, cancel_futures=True)

    def _build(self, source: PromptInput, model: ServedModel) -> Prompt:
        match source:
            case Conversation():
                images = tuple(
                    SourceImage(
                        index,
                        media,
                        media_digest(model.digest, model.processor_digest, media),
                        sum(map(estimated_pixels, media_files(media))),
                    )
                    for index, media in enumerate(source.images)
                )
                return Prompt(tuple(self._render(source)), images, model.processor_digest)
            case TextPrompt():
                guard = ControlTokenGuard(self._tokenizer.added_tokens, [source.text])
                text = guard.split(guard.mark([source.text])[0])
                return Prompt(tuple(self._tokenizer.encode_guarded(text, add_special_tokens=True)))
            case _:
                unknown = self._tokenizer.unknown_ids(source.token_ids)
                if unknown:
                    raise InvalidRequestError(
                        f"token {unknown[0]} is not below {self._tokenizer.vocab_size}, the size "
                        "of the vocabulary",
                        field="token_prompt.token_ids",
                    )
                return Prompt(source.token_ids)

    def _render(self, conversation: Conversation) -> list[int]:
        template = require_template(self._template)
        require_tools(template, conversation)
        texts = [
            part.text
            for message in conversation.messages
            for part in message.parts
            if isinstance(part, TextPart)
        ]
        guard = ControlTokenGuard(self._tokenizer.added_tokens, [*texts, *tool_texts(conversation)])
        messages = [
            {
                "role": message.role,
                "content": _content(message.parts, guard, template),
                **tool_fields(message, guard),
            }
            for message in conversation.messages
        ]
        rendered = template.render(messages, template_tools(conversation.tools, guard))
        return self._tokenizer.encode_guarded(guard.split(rendered))


def _content(
    parts: Sequence[Part], guard: ControlTokenGuard, template: ChatTemplate
) -> str | list[dict[str, Any]]:
    """A message's content in the form the template takes; texts are marked by the guard."""
    texts = iter(guard.mark([part.text for part in parts if isinstance(part, TextPart)]))
    if not template.takes_parts:
        if not all(isinstance(part, TextPart) for part in parts):
            raise InvalidRequestError(
                "the model's chat template takes no images", field="conversation.messages"
            )
        return "".join(texts)
    return [_part(part, texts) for part in parts]


def _part(part: Part, texts: Iterator[str]) -> dict[str, Any]:
    if isinstance(part, TextPart):
        return {"type": "text", "text": next(texts)}
    return {"type": "video" if isinstance(part, VideoPart) else "image"}
