"""The router without its wire: takes calls, gives deltas."""

import asyncio
import dataclasses
from collections.abc import AsyncGenerator, Sequence

from opentelemetry import context as otel_context

from epd.cleanup import cancel_and_wait
from epd.errors import InvalidRequestError, UnsupportedFeatureError
from epd.media import media_files
from epd.sampling import SamplingParams, TopLogprobs
from services.router.attempt import Work
from services.router.calls import Completion, Conversation, Delta, GenerateCall, PromptInput
from services.router.critical_path import CriticalPath
from services.router.deadline import Deadline
from services.router.image_urls.url_images import has_urls
from services.router.leg import LegFailedError
from services.router.request_run import RequestRun
from services.router.router_parts import RouterParts
from services.router.telemetry import RequestRecord
from services.router.workers import ServedModel


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
        self._parts.limits.check_sampling(call.sampling)
        with self._parts.admission.admitted(
            call.client, call.request_id, _image_bytes(call.prompt)
        ) as place:
            model = await self._served_model(call.model, deadline)
            record = RequestRecord(
                self._parts.telemetry, self._parts.metrics, call, model.name, path
            )
            run = RequestRun(self._parts, call, model, place, deadline, path, record)
            # The task, not this generator, runs inside the span: a generator shares its context
            # with whoever iterates it.
            token = otel_context.attach(record.context)
            producer = asyncio.create_task(run.run())
            otel_context.detach(token)
            try:
                async for event in run.output.deltas():
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

    async def model(self, deadline: Deadline) -> ServedModel:
        """The served model; where there is no worker, one may come within patience.

        Raises:
            UnavailableError: none does.
            DeadlineExceededError: the request's time is up.
        """
        patience_s = min(self._parts.worker_patience_s, deadline.remaining_s())
        return await self._parts.registry.model_soon(patience_s)

    async def count_tokens(
        self, prompt: PromptInput, client: str, request_id: str, deadline: Deadline
    ) -> int:
        """Prompt tokens, image placeholders included.

        Raises:
            UnsupportedFeatureError: images, but no encoder is in use.
            EpdError: as for :meth:`generate`.
        """
        with self._parts.admission.admitted(client, request_id, _image_bytes(prompt)) as place:
            model = await self.model(deadline)
            prompt = await self._parts.url_images.fetched(prompt, model, deadline, place.hold)
            built = await self._parts.builder.build(prompt, model)
            if built.images and not self._parts.routes.disaggregates:
                raise UnsupportedFeatureError(
                    "counting images needs an encoder", reason="COUNT_NEEDS_ENCODER"
                )
            work = Work(request_id, built, SamplingParams(), deadline, CriticalPath(), _refuse)
            try:
                return await self._parts.dispatcher.count_tokens(work)
            except LegFailedError as failure:
                raise failure.error from failure

    async def _served_model(self, name: str, deadline: Deadline) -> ServedModel:
        model = await self.model(deadline)
        if name and name != model.name:
            raise InvalidRequestError(
                f"model {name!r} is not served, {model.name!r} is",
                field="model",
                reason="MODEL_NOT_SERVED",
            )
        return model


def _image_bytes(prompt: PromptInput) -> int:
    if not isinstance(prompt, Conversation):
        return 0
    return sum(len(file) for media in prompt.images for file in media_files(media))


async def _refuse(
    token_ids: Sequence[int], logprobs: Sequence[float], tops: Sequence[TopLogprobs]
) -> bool:
    raise AssertionError("counting tokens emits none")
