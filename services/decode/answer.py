"""Engine events of one request on their way to the router."""

import time
from collections.abc import AsyncGenerator, Awaitable, Callable
from dataclasses import dataclass

from epd.engine.requests import (
    Admitted,
    EngineEvent,
    Failed,
    Finished,
    NewTokens,
    Preempted,
)
from epd.telemetry import semconv
from epd.v1 import common_pb2, decode_pb2
from epd.wire.finish_reason import finish_reason_to_proto
from epd.wire.timings import timings_to_proto
from epd.wire.top_logprobs import top_to_proto
from epd.worker.stages import Stages
from services.decode.token_buffer import TokenBuffer

#: Sends one event to the router; waits while its stream takes no more.
Emit = Callable[[decode_pb2.DecodeResponse], Awaitable[None]]


@dataclass(frozen=True)
class PromptFacts:
    """What usage reports and the engine does not know; token counts."""

    prompt_tokens: int
    image_tokens: int
    #: Found in this worker's prefix cache when the KV was received, not computed here.
    cached_tokens: int = 0

    def usage(self, engine_cached_tokens: int, completion_tokens: int = 0) -> common_pb2.Usage:
        """The wire's usage, with the hits of the engine's own look-up and the tokens drawn."""
        return common_pb2.Usage(
            prompt_tokens=self.prompt_tokens,
            completion_tokens=completion_tokens,
            cached_tokens=self.cached_tokens + engine_cached_tokens,
            image_tokens=self.image_tokens,
        )


async def send_answer(
    events: AsyncGenerator[EngineEvent, None],
    admitted: Admitted,
    facts: PromptFacts,
    stages: Stages,
    emit: Emit,
    max_buffered_tokens: int,
) -> None:
    """Streams everything after admission. Closes ``events`` on every path.

    Raises:
        EpdError: what the engine's Failed says, or that the reader is too slow.
    """
    admitted_ns = time.monotonic_ns()
    stages.add(semconv.SPAN_QUEUE, admitted_ns - admitted.queue_ns, admitted_ns)
    async with TokenBuffer(events, max_buffered_tokens) as buffer:
        await emit(
            decode_pb2.DecodeResponse(
                started=decode_pb2.Started(
                    timings=timings_to_proto(stages.durations_ns),
                    service_ns=stages.service_ns(),
                    usage=facts.usage(admitted.cached_tokens),
                )
            )
        )
        started_ns = time.monotonic_ns()
        with stages.stage(semconv.SPAN_DECODE) as attributes:
            if admitted.early is not None:
                attributes[semconv.EPD_EARLY_STEP_COMMITTED] = admitted.early
            async for event in buffer:
                match event:
                    case NewTokens():
                        await emit(_tokens(event))
                    case Preempted():
                        await emit(decode_pb2.DecodeResponse(preempted=decode_pb2.Preempted()))
                        return
                    case Failed():
                        raise event.error
                    case Finished():
                        attributes[semconv.EPD_TOKENS_OUTPUT] = event.completion_tokens
                        await emit(_finished(event, facts, time.monotonic_ns() - started_ns))


def _tokens(event: NewTokens) -> decode_pb2.DecodeResponse:
    return decode_pb2.DecodeResponse(
        tokens=decode_pb2.Tokens(
            token_ids=event.token_ids,
            logprobs=event.logprobs,
            top_logprobs=map(top_to_proto, event.top_logprobs),
        )
    )


def _finished(
    event: Finished, facts: PromptFacts, since_started_ns: int
) -> decode_pb2.DecodeResponse:
    timings = {semconv.SPAN_DECODE: event.decode_ns}
    if event.prefill_ns:
        timings[semconv.SPAN_PREFILL] = event.prefill_ns
    return decode_pb2.DecodeResponse(
        finished=decode_pb2.Finished(
            finish_reason=finish_reason_to_proto(event.reason),
            timings=timings_to_proto(timings),
            # The engine began before Started was written.
            service_ns=max(since_started_ns, event.prefill_ns + event.decode_ns),
            usage=facts.usage(event.cached_tokens, event.completion_tokens),
        )
    )
