"""An answer: on its way and at its end."""

from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

import grpc

from epd.errors import InternalError
from epd.rpc.status import error_from_rpc
from epd.sampling import FinishReason, TopLogprobs
from epd.v1 import router_pb2
from epd.wire.finish_reason import finish_reason_from_proto
from epd.wire.timings import timings_from_proto
from epd.wire.top_logprobs import tops_from_proto


@dataclass(frozen=True)
class Delta:
    """New tokens and the text they complete.

    ``logprobs`` and ``top_logprobs`` only when asked for, one per token.
    """

    token_ids: tuple[int, ...]
    text: str
    logprobs: tuple[float, ...] = ()
    top_logprobs: tuple[TopLogprobs, ...] = ()


@dataclass(frozen=True)
class Usage:
    """Token counts; cached and image tokens are part of the prompt's."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    image_tokens: int


@dataclass(frozen=True)
class Completion:
    """The end of an answer. Times are in nanoseconds, as the router measured them."""

    finish_reason: FinishReason
    usage: Usage
    request_id: str
    ttft_ns: int
    attempt_count: int
    timings_ns: dict[str, int]


@dataclass(frozen=True)
class Answer:
    """A whole answer."""

    text: str
    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    completion: Completion
    top_logprobs: tuple[TopLogprobs, ...] = ()


class AnswerStream:
    """An answer on its way: iterate it once. Leaving it early cancels the request everywhere."""

    def __init__(self, call: Any) -> None:
        self._call = call
        self._completion: Completion | None = None

    @property
    def completion(self) -> Completion:
        """The end of the answer.

        Raises:
            RuntimeError: the stream has not been read to its end.
        """
        if self._completion is None:
            raise RuntimeError("the answer has not ended yet")
        return self._completion

    async def __aiter__(self) -> AsyncIterator[Delta]:
        """The deltas in order.

        Raises:
            EpdError: what the router answered, as the error class of its status.
        """
        try:
            async for response in self._call:
                if response.WhichOneof("event") == "completion":
                    self._completion = _completion(response.completion)
                else:
                    delta = response.delta
                    yield Delta(
                        tuple(delta.token_ids),
                        delta.text,
                        tuple(delta.logprobs),
                        tuple(tops_from_proto(delta.top_logprobs)),
                    )
        except grpc.aio.AioRpcError as error:
            raise error_from_rpc(error) from error
        finally:
            self._call.cancel()
        if self._completion is None:
            raise InternalError("the answer ended without a completion")

    async def collect(self) -> Answer:
        """Reads to the end.

        Raises:
            EpdError: as for iterating.
        """
        deltas = [delta async for delta in self]
        return Answer(
            text="".join(delta.text for delta in deltas),
            token_ids=tuple(token for delta in deltas for token in delta.token_ids),
            logprobs=tuple(value for delta in deltas for value in delta.logprobs),
            completion=self.completion,
            top_logprobs=tuple(top for delta in deltas for top in delta.top_logprobs),
        )

    def cancel(self) -> None:
        """Ends the request; all services free what they hold for it."""
        self._call.cancel()


def _completion(message: router_pb2.Completion) -> Completion:
    reason = finish_reason_from_proto(message.finish_reason)
    if reason is None:
        raise InternalError(f"unknown finish reason {message.finish_reason}")
    return Completion(
        finish_reason=reason,
        usage=Usage(
            prompt_tokens=message.usage.prompt_tokens,
            completion_tokens=message.usage.completion_tokens,
            cached_tokens=message.usage.cached_tokens,
            image_tokens=message.usage.image_tokens,
        ),
        request_id=message.request_id,
        ttft_ns=message.ttft_ns,
        attempt_count=message.attempt_count,
        timings_ns=timings_from_proto(message.timings),
    )
