"""Requests that a unified worker serves alone: encode, prefill and decode in this process."""

from collections.abc import AsyncGenerator
from contextlib import aclosing

from opentelemetry.trace import Tracer

from epd.engine.async_engine import AsyncEngine
from epd.engine.requests import (
    Admitted,
    EngineEvent,
    EngineRequest,
    Failed,
    NewTokens,
    RequestMode,
)
from epd.rpc.request_context import new_id
from epd.worker.stages import Stages
from services.decode.answer import Emit, PromptFacts, send_answer
from services.decode.expansion import expand_images
from services.decode.local_images import EncodedImages, LocalImages
from services.decode.request import DecodeJob, LocalImage


class LocalDecoding:
    """Runs whole requests.

    Args:
        engine: Prefills and decodes.
        images: Encodes.
        tracer: The service's.
        max_buffered_tokens: Tokens held for a slow reader.
    """

    def __init__(
        self,
        engine: AsyncEngine,
        images: LocalImages,
        tracer: Tracer,
        *,
        max_buffered_tokens: int,
    ) -> None:
        self._engine = engine
        self._images = images
        self._tracer = tracer
        self._max_buffered_tokens = max_buffered_tokens

    async def run(self, job: DecodeJob, images: tuple[LocalImage, ...], emit: Emit) -> None:
        """One request. Cancelling it ends it within a step.

        Raises:
            EpdError: an image or the prompt is unfit, or why encoder or engine gave up.
        """
        stages = Stages(self._tracer)
        matcher = await self._engine.matcher(job.sampling, job.emitted)
        async with self._images.encoded(images, stages) as encoded:
            prompt = expand_images(job, images, encoded.plans)
            request = EngineRequest(
                request_id=new_id(),  # the client's may come again while this one is cancelled
                token_ids=prompt.token_ids,
                sampling=job.sampling,
                mode=RequestMode.FULL,
                emitted_count=job.emitted_count,
                images=prompt.images,
                embeddings=encoded.tensors,
                position_delta=prompt.position_delta,
                matcher=matcher,
            )
            facts = PromptFacts(
                len(prompt.token_ids) - job.emitted_count,
                sum(image.length for image in prompt.images),
            )
            async with aclosing(self._engine.generate(request)) as events:
                first = await anext(events)
                if isinstance(first, Failed):
                    raise first.error
                assert isinstance(first, Admitted)
                rest = _releasing(events, encoded)
                await send_answer(rest, first, facts, stages, emit, self._max_buffered_tokens)


async def _releasing(
    events: AsyncGenerator[EngineEvent, None], encoded: EncodedImages
) -> AsyncGenerator[EngineEvent, None]:
    """The same events; at the first token the embeddings are given back, decoding needs none."""
    async for event in events:
        if isinstance(event, NewTokens):
            encoded.release()
        yield event
