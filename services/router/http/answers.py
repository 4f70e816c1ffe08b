"""Answers as JSON objects: whole, or chunk by chunk."""

import abc
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from epd.text.token_bytes import TokenBytes
from epd.text.tool_output import ToolOutput
from services.router.calls import Completion, Delta, Usage
from services.router.http.chat_message import MessageWriter
from services.router.http.logprobs import CompletionLogprobs, chat_logprobs


@dataclass(frozen=True)
class Collected:
    """One whole choice."""

    delta: Delta
    completion: Completion


class AnswerFormat(abc.ABC):
    """The shape of one endpoint's answers; one object per request.

    Args:
        request_id: The first choice's.
        model: As clients call it.
        logprobs: What spells tokens; None when log probabilities were not asked for.
        choice_count: Answers to each prompt.
    """

    id_prefix: str
    whole_object: str
    chunk_object: str

    def __init__(
        self, request_id: str, model: str, logprobs: TokenBytes | None, choice_count: int
    ) -> None:
        self._choice_count = choice_count
        self._answer_id = f"{self.id_prefix}-{request_id}"
        self._model = model
        self._created_s = int(time.time())
        self._logprobs = logprobs

    def whole(self, choices: Sequence[Collected]) -> dict[str, Any]:
        """The answer in one piece."""
        usage = self._total_usage([choice.completion for choice in choices])
        return {
            **self._head(self.whole_object),
            "choices": [self._choice(index, choice) for index, choice in enumerate(choices)],
            "usage": usage_shape(usage),
        }

    def usage_chunk(self, completions: Sequence[Completion]) -> dict[str, Any]:
        """The last chunk of a stream that shall tell token counts."""
        usage = self._total_usage(completions)
        return {**self._head(self.chunk_object), "choices": [], "usage": usage_shape(usage)}

    @abc.abstractmethod
    def begin(self, index: int) -> dict[str, Any] | None:
        """What a choice begins with, before its first token; None for nothing."""

    @abc.abstractmethod
    def delta(self, index: int, delta: Delta) -> dict[str, Any] | None:
        """New tokens of a choice; None where nothing of them can be told yet."""

    @abc.abstractmethod
    def end(self, index: int, completion: Completion) -> dict[str, Any]:
        """The end of a choice."""

    @abc.abstractmethod
    def _choice(self, index: int, collected: Collected) -> dict[str, Any]:
        """A whole choice."""

    def _total_usage(self, completions: Sequence[Completion]) -> Usage:
        """Each prompt once, all tokens of all choices."""
        usages = [completion.usage for completion in completions]
        prompts = usages[:: self._choice_count]
        return Usage(
            prompt_tokens=sum(usage.prompt_tokens for usage in prompts),
            completion_tokens=sum(usage.completion_tokens for usage in usages),
            cached_tokens=sum(usage.cached_tokens for usage in prompts),
            image_tokens=sum(usage.image_tokens for usage in prompts),
        )

    def _chunk(self, choice: dict[str, Any]) -> dict[str, Any]:
        return {**self._head(self.chunk_object), "choices": [choice]}

    def _head(self, kind: str) -> dict[str, Any]:
        return {
            "id": self._answer_id,
            "object": kind,
            "created": self._created_s,
            "model": self._model,
        }


class ChatFormat(AnswerFormat):
    """Chat completions.

    Args:
        new_output: Makes what takes a choice's answer apart; gives None where answers are text.
    """

    id_prefix = "chatcmpl"
    whole_object = "chat.completion"
    chunk_object = "chat.completion.chunk"

    def __init__(
        self,
        request_id: str,
        model: str,
        logprobs: TokenBytes | None,
        choice_count: int,
        new_output: Callable[[], ToolOutput | None],
    ) -> None:
        super().__init__(request_id, model, logprobs, choice_count)
        self._new_output = new_output
        self._writers: dict[int, MessageWriter] = {}

    def begin(self, index: int) -> dict[str, Any]:
        """See the base."""
        message = {"role": "assistant", "content": ""}
        return self._chunk(
            {"index": index, "delta": message, "logprobs": None, "finish_reason": None}
        )

    def delta(self, index: int, delta: Delta) -> dict[str, Any] | None:
        """See the base."""
        message = self._writer(index).more(delta)
        if not message and self._logprobs is None:
            return None
        return self._chunk(
            {
                "index": index,
                "delta": message,
                "logprobs": self._logprobs and chat_logprobs(delta, self._logprobs),
                "finish_reason": None,
            }
        )

    def end(self, index: int, completion: Completion) -> dict[str, Any]:
        """See the base."""
        writer = self._writer(index)
        message = writer.rest()
        reason = writer.finish_reason(completion.finish_reason)
        return self._chunk(
            {"index": index, "delta": message, "logprobs": None, "finish_reason": reason}
        )

    def _choice(self, index: int, collected: Collected) -> dict[str, Any]:
        writer = self._writer(index)
        message = {"role": "assistant", "refusal": None, **writer.whole(collected.delta.text)}
        return {
            "index": index,
            "message": message,
            "logprobs": self._logprobs and chat_logprobs(collected.delta, self._logprobs),
            "finish_reason": writer.finish_reason(collected.completion.finish_reason),
        }

    def _writer(self, index: int) -> MessageWriter:
        if index not in self._writers:
            self._writers[index] = MessageWriter(self._new_output())
        return self._writers[index]


class CompletionFormat(AnswerFormat):
    """Completions: text without roles.

    Args:
        echoes: Texts of the prompts where answers shall begin with them, else empty.
    """

    id_prefix = "cmpl"
    whole_object = "text_completion"
    chunk_object = "text_completion"

    def __init__(
        self,
        request_id: str,
        model: str,
        logprobs: TokenBytes | None,
        choice_count: int,
        echoes: Sequence[str],
    ) -> None:
        super().__init__(request_id, model, logprobs, choice_count)
        self._echoes = echoes
        self._writers: dict[int, CompletionLogprobs] = {}

    def begin(self, index: int) -> dict[str, Any] | None:
        """See the base."""
        if not self._echoes:
            return None
        echo = {"index": index, "text": self._echo(index), "logprobs": None}
        return self._chunk({**echo, "finish_reason": None})

    def delta(self, index: int, delta: Delta) -> dict[str, Any]:
        """See the base."""
        return self._chunk(self._text(index, delta, None))

    def end(self, index: int, completion: Completion) -> dict[str, Any]:
        """See the base."""
        nothing = {"index": index, "text": "", "logprobs": None}
        return self._chunk({**nothing, "finish_reason": completion.finish_reason.value})

    def _choice(self, index: int, collected: Collected) -> dict[str, Any]:
        reason = collected.completion.finish_reason.value
        choice = self._text(index, collected.delta, reason)
        return {**choice, "text": self._echo(index) + choice["text"]}

    def _echo(self, index: int) -> str:
        return self._echoes[index // self._choice_count] if self._echoes else ""

    def _text(self, index: int, delta: Delta, finish_reason: str | None) -> dict[str, Any]:
        logprobs = None
        if self._logprobs is not None:
            writer = self._writers.setdefault(index, CompletionLogprobs(self._logprobs))
            logprobs = writer.of(delta)
        return {
            "index": index,
            "text": delta.text,
            "logprobs": logprobs,
            "finish_reason": finish_reason,
        }


def usage_shape(usage: Usage) -> dict[str, Any]:
    """Token counts."""
    return {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        "prompt_tokens_details": {"cached_tokens": usage.cached_tokens},
    }
