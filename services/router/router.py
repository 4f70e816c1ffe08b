"""The router without its wire: takes calls, gives deltas."""

import asyncio
import contextlib
import dataclasses
import time
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from dataclasses import dataclass

from opentelemetry import context as otel_context
from opentelemetry.metrics import Counter

from epd.cleanup import cancel_and_wait
from epd.errors import InvalidRequestError, UnsupportedFeatureError
from epd.media import media_files
from epd.sampling import SamplingParams, TopLogprobs
from epd.telemetry.genai_metrics import GenAiMetrics
from epd.telemetry.setup import Telemetry
from epd.text.detokenizer import IncrementalDetokenizer
from epd.text.stop_strings import StopStringScanner
from epd.text.tokenizer import Tokenizer
from services.router.admission import Admission, Place
from services.router.attempt import Work
from services.router.calls import Completion, Conversation, Delta, GenerateCall, PromptInput
from services.router.critical_path import (
    ROUTER_DOWNLOAD,
    ROUTER_PREPROCESS,
    ROUTER_QUEUE,
    CriticalPath,
)
from services.router.deadline import Deadline
from services.router.dispatcher import Dispatcher
from services.router.generation import Generation, GenerationBounds
from services.router.image_urls.url_images import UrlImages, has_urls
from services.router.leg import LegFailedError
from services.router.limits import RequestLimits
from services.router.output import OutputStream
from services.router.overload import check_deadline
from services.router.prompt import PromptBuilder
from services.router.registry import WorkerRegistry
from services.router.retry import RetryPolicy
from services.router.retry_budget import RetryBudget
from services.router.telemetry import RequestRecord
from services.router.waiting_line import Turn, WaitingLine
from services.router.workers import ServedModel


@dataclass(frozen=True)
class RouterParts:
    """What the router works with. ``end_ids`` are the model's end tokens."""

    registry: WorkerRegistry
    dispatcher: Dispatcher
    builder: PromptBuilder
    url_images: UrlImages
    tokenizer: Tokenizer
    admission: Admission
    line: WaitingLine
    limits: RequestLimits
    policy: RetryPolicy
    budget: RetryBudget
    telemetry: Telemetry
    metrics: GenAiMetrics
    retries: Counter
    end_ids: frozenset[int]
    first_token_timeout_s: float
    worker_patience_s: float
    output_capacity: int
    coalesce_s: float


class Router:
    """Answers requests."""

    def __init__(self, parts: RouterParts) -> None:
        self._parts = parts

    async def generate(
        self, call: GenerateCall, deadline: Deadline
    ) -> AsyncGenerator[Delta | Completion, None]:
        """Deltas, then the completion. Closing the iterator cancels the request everywhere.

        Raises:
            EpdError: with the status the client is to see; tokens sent before it stand.
        """
        path = CriticalPath()
        self._parts.limits.check_stop(call.stop)
        self._parts.limits.check_constraint(call.sampling.constraint)
        with self._parts.admission.admitted(
            call.client, call.request_id, _image_bytes(call.prompt)
        ) as place:
            model = await self._served_model(call.model, deadline)
            record = RequestRecord(self._parts.telemetry, self._parts.metrics, call, model.name)
            output = self._output(call)
            # The task, not this generator, runs inside the span: a generator shares its context
            # with whoever iterates it.
            token = otel_context.attach(record.context)
            producer = asyncio.create_task(
                self._produce(call, model, place, deadline, path, record, output)
            )
            otel_context.detach(token)
            try:
                async for event in output.deltas():
                    yield event
            finally:
                await cancel_and_wait(producer)
                record.close()

    async def with_images(self, call: GenerateCall, deadline: Deadline) -> GenerateCall:
        """The call with its images downloaded, for several answers to it.

        Raises:
            EpdError: as for :meth:`generate`.
        """
        if not has_urls(call.prompt):
            return call
        with self._parts.admission.admitted(
            call.client, call.request_id, _image_bytes(call.prompt)
        ) as place:
            model = await self._served_model(call.model, deadline)
            prompt = await self._parts.url_images.fetched(call.prompt, model, deadline, place.hold)
        return dataclasses.replace(call, prompt=prompt)

    async def count_tokens(
        self, prompt: PromptInput, client: str, request_id: str, deadline: Deadline
    ) -> int:
        """Prompt tokens, image placeholders included.

        Raises:
            UnsupportedFeatureError: images, but no encoder is in use.
            EpdError: as for :meth:`generate`.
        """
        with self._parts.admission.admitted(client, request_id, _image_bytes(prompt)) as place:
            model = await self._model(deadline)
            prompt = await self._parts.url_images.fetched(prompt, model, deadline, place.hold)
            built = await self._parts.builder.build(prompt, model)
            if built.images and not self._parts.dispatcher.disaggregates():
                raise UnsupportedFeatureError(
                    "counting images needs an encoder", reason="COUNT_NEEDS_ENCODER"
                )
            work = Work(request_id, built, SamplingParams(), deadline, CriticalPath(), _refuse)
            try:
                return await self._parts.dispatcher.count_tokens(work)
            except LegFailedError as failure:
                raise failure.error from failure

    async def _produce(
        self,
        call: GenerateCall,
        model: ServedModel,
        place: Place,
        deadline: Deadline,
        path: CriticalPath,
        record: RequestRecord,
        output: OutputStream,
    ) -> None:
        """Fills the output; whatever happens is told there and in the record."""
        try:
            source = await self._parts.url_images.fetched(call.prompt, model, deadline, place.hold)
            downloaded_ns = path.elapsed_ns() if source is not call.prompt else 0
            if downloaded_ns:
                path.add(ROUTER_DOWNLOAD, downloaded_ns)
            prompt = await self._parts.builder.build(source, model)
            path.add(ROUTER_PREPROCESS, path.elapsed_ns() - downloaded_ns)
            work = Work(
                call.request_id,
                prompt,
                call.sampling,
                deadline,
                path,
                output.push,
                output.token_ids,
            )
            bounds = GenerationBounds(
                first_token_timeout_s=self._parts.first_token_timeout_s,
                context_length=model.context_length,
                end_ids=self._end_ids(call.sampling),
            )
            async with self._turn(call, work) as turn:
                completion = await Generation(
                    work,
                    output,
                    self._parts.dispatcher,
                    self._parts.policy,
                    bounds,
                    self._parts.budget,
                    self._parts.retries,
                    [record.first_token, turn.over],
                ).run()
        except Exception as error:
            record.failed(error)
            output.fail(error)
        else:
            record.completed(completion)
            output.complete(completion)

    @contextlib.asynccontextmanager
    async def _turn(self, call: GenerateCall, work: Work) -> AsyncIterator[Turn]:
        """The request's turn to be encoded and prefilled.

        Raises:
            ResourceExhaustedError: it would come too late, or the queue is full.
        """
        line = self._parts.line
        budget_s = min(self._parts.first_token_timeout_s, work.deadline.remaining_s())
        wait_s = line.expected_wait_s(call.priority)
        ttft_s, queued = await self._parts.dispatcher.expected_ttft_s(work)
        check_deadline(wait_s + ttft_s, budget_s, queued=queued or wait_s > 0)
        started_ns = time.monotonic_ns()
        async with line.turn(call.priority, call.client, budget_s) as turn:
            work.path.add(ROUTER_QUEUE, time.monotonic_ns() - started_ns)
            yield turn

    async def _model(self, deadline: Deadline) -> ServedModel:
        patience_s = min(self._parts.worker_patience_s, deadline.remaining_s())
        return await self._parts.registry.model_soon(patience_s)

    async def _served_model(self, name: str, deadline: Deadline) -> ServedModel:
        model = await self._model(deadline)
        if name and name != model.name:
            raise InvalidRequestError(
                f"model {name!r} is not served, {model.name!r} is",
                field="model",
                reason="MODEL_NOT_SERVED",
            )
        return model

    def _output(self, call: GenerateCall) -> OutputStream:
        return OutputStream(
            IncrementalDetokenizer(self._parts.tokenizer),
            StopStringScanner(call.stop),
            silent_ids=frozenset(call.sampling.stop_token_ids),
            capacity=self._parts.output_capacity,
            coalesce_s=self._parts.coalesce_s,
        )

    def _end_ids(self, sampling: SamplingParams) -> frozenset[int]:
        own = frozenset() if sampling.ignore_eos else self._parts.end_ids
        return own | frozenset(sampling.stop_token_ids)


def _image_bytes(prompt: PromptInput) -> int:
    if not isinstance(prompt, Conversation):
        return 0
    return sum(len(file) for media in prompt.images for file in media_files(media))


async def _refuse(
    token_ids: Sequence[int], logprobs: Sequence[float], tops: Sequence[TopLogprobs]
) -> bool:
    raise AssertionError("counting tokens emits none")
