"""From a prompt and its embeddings to its KV and first token."""

import time
from collections.abc import AsyncIterator
from contextlib import aclosing

from epd.engine.async_engine import AsyncEngine
from epd.engine.grammar import Matcher
from epd.engine.image_gate import ImageGate
from epd.engine.requests import (
    Admitted,
    EngineEvent,
    EngineRequest,
    Failed,
    PrefillDone,
    RequestMode,
)
from epd.telemetry import semconv
from epd.worker.stages import Stages
from services.prefill.embeddings import Custody, Embeddings
from services.prefill.request import PrefillJob

#: The engine takes a request at its next step; a longer wait is shown as queueing.
ENGINE_QUEUE_NOTABLE_NS = 1_000_000


class Computation:
    """Reads embeddings and runs the engine; the KV stays in place until :meth:`release`."""

    def __init__(self, engine: AsyncEngine, embeddings: Embeddings) -> None:
        self._engine = engine
        self._embeddings = embeddings

    async def matcher(self, job: PrefillJob) -> Matcher | None:
        """What the request's constraint needs; None without one.

        Raises:
            EpdError: the constraint is malformed or not supported.
        """
        emitted = job.token_ids[len(job.token_ids) - job.emitted_count :]
        return await self._engine.matcher(job.sampling, emitted)

    async def run(
        self,
        job: PrefillJob,
        engine_id: str,
        matcher: Matcher | None,
        custody: Custody,
        stages: Stages,
    ) -> PrefillDone:
        """One request. Cancelling it ends it in the engine within a step.

        Raises:
            EpdError: why embeddings or first token are not to be had.
        """
        gate = ImageGate(job.images, job.pending) if job.pending else None

        def arrived(position: int) -> None:
            assert gate is not None
            gate.open(position)
            self._engine.engine.proceed()

        async with self._embeddings.read(custody, stages, job.pending, arrived) as embeddings:
            request = EngineRequest(
                request_id=engine_id,
                token_ids=job.token_ids,
                sampling=job.sampling,
                mode=RequestMode.PREFILL_ONLY,
                emitted_count=job.emitted_count,
                images=job.images,
                embeddings=embeddings,
                gate=gate,
                position_delta=job.position_delta,
                matcher=matcher,
            )
            async with aclosing(self._engine.generate(request)) as events:
                return await _prefill_done(events, stages)

    def release(self, engine_id: str) -> None:
        """The blocks of a request may be used again: no WRITE reads them any more."""
        self._engine.engine.release(engine_id)


async def _prefill_done(events: AsyncIterator[EngineEvent], stages: Stages) -> PrefillDone:
    """Follows one engine request to its first token.

    Raises:
        EpdError: what the engine's Failed says.
    """
    start_ns = time.monotonic_ns()
    try:
        async for event in events:
            now_ns = time.monotonic_ns()
            match event:
                case Admitted():
                    if event.queue_ns > ENGINE_QUEUE_NOTABLE_NS:
                        stages.add(semconv.SPAN_QUEUE, now_ns - event.queue_ns, now_ns)
                    else:
                        stages.count(semconv.SPAN_QUEUE, event.queue_ns)
                    start_ns = now_ns
                case PrefillDone():
                    end_ns = event.forward_ended_ns
                    cached = {semconv.EPD_TOKENS_CACHED: event.cached_tokens}
                    stages.add(semconv.SPAN_PREFILL, end_ns - event.forward_ns, end_ns, cached)
                    return event
                case Failed():
                    raise event.error
    except BaseException as error:
        stages.add(semconv.SPAN_PREFILL, start_ns, time.monotonic_ns(), error=error)
        raise
    raise AssertionError("the engine ended a request without a last event")
