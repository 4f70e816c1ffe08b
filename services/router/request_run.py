"""One request, from its prompt to the end of its answer."""

import contextlib
import time
from collections.abc import AsyncIterator

from epd.text.detokenizer import IncrementalDetokenizer
from epd.text.stop_strings import StopStringScanner
from services.router.admission import Place
from services.router.attempt import Work
from services.router.calls import Completion, GenerateCall
from services.router.critical_path import (
    ROUTER_DOWNLOAD,
    ROUTER_PREPROCESS,
    ROUTER_QUEUE,
    CriticalPath,
)
from services.router.deadline import Deadline
from services.router.generation import Generation, GenerationBounds
from services.router.output import OutputStream
from services.router.overload import check_deadline
from services.router.router_parts import RouterParts
from services.router.telemetry import RequestRecord
from services.router.waiting_line import Turn
from services.router.workers import ServedModel


class RequestRun:
    """Builds the prompt, waits for its turn and has the answer generated.

    Args:
        parts: The router's.
        call: The request.
        model: Serves it.
        place: Its place among the live requests.
        deadline: Its own.
        path: Where its time goes; begun on arrival.
        record: Its span and metrics.
    """

    def __init__(
        self,
        parts: RouterParts,
        call: GenerateCall,
        model: ServedModel,
        place: Place,
        deadline: Deadline,
        path: CriticalPath,
        record: RequestRecord,
    ) -> None:
        self._parts = parts
        self._call = call
        self._model = model
        self._place = place
        self._deadline = deadline
        self._path = path
        self._record = record
        self.output = OutputStream(
            IncrementalDetokenizer(parts.tokenizer),
            StopStringScanner(call.stop),
            silent_ids=frozenset(call.sampling.stop_token_ids),
            capacity=parts.output_capacity,
            coalesce_s=parts.coalesce_s,
        )

    async def run(self) -> None:
        """Fills the output; whatever happens is told there and in the record."""
        try:
            work = await self._work()
            async with self._turn(work) as turn:
                completion = await self._generate(work, turn)
        except Exception as error:
            self._record.failed(error)
            self.output.fail(error)
        else:
            self._record.completed(completion)
            self.output.complete(completion)

    async def _work(self) -> Work:
        """What all attempts have in common: images downloaded, prompt rendered and tokenized."""
        parts, call, model, path = self._parts, self._call, self._model, self._path
        source = await parts.url_images.fetched(
            call.prompt, model, self._deadline, self._place.hold
        )
        downloaded_ns = path.elapsed_ns() if source is not call.prompt else 0
        if downloaded_ns:
            path.add(ROUTER_DOWNLOAD, downloaded_ns)
        prompt = await parts.builder.build(source, model)
        path.add(ROUTER_PREPROCESS, path.elapsed_ns() - downloaded_ns)
        output = self.output
        return Work(
            call.request_id,
            prompt,
            call.sampling,
            self._deadline,
            path,
            output.push,
            output.token_ids,
        )

    @contextlib.asynccontextmanager
    async def _turn(self, work: Work) -> AsyncIterator[Turn]:
        """The request's turn to be encoded and prefilled.

        Raises:
            ResourceExhaustedError: it would come too late, or the queue is full.
        """
        started_ns = time.monotonic_ns()
        parts, call = self._parts, self._call
        budget_s = min(parts.first_token_timeout_s, self._deadline.remaining_s())
        wait_s = parts.line.expected_wait_s(call.priority)
        ttft_s, queued = await parts.dispatcher.expected_ttft_s(work)
        check_deadline(wait_s + ttft_s, budget_s, queued=queued or wait_s > 0)
        async with parts.line.turn(call.priority, call.client, budget_s) as turn:
            self._path.add(ROUTER_QUEUE, time.monotonic_ns() - started_ns)
            yield turn

    async def _generate(self, work: Work, turn: Turn) -> Completion:
        parts, sampling = self._parts, self._call.sampling
        end_ids = frozenset() if sampling.ignore_eos else parts.end_ids
        bounds = GenerationBounds(
            first_token_timeout_s=parts.first_token_timeout_s,
            context_length=self._model.context_length,
            end_ids=end_ids | frozenset(sampling.stop_token_ids),
        )
        return await Generation(
            work,
            self.output,
            parts.routes,
            parts.dispatcher,
            parts.policy,
            bounds,
            parts.budget,
            parts.retries,
            [self._record.first_token, turn.over],
        ).run()
