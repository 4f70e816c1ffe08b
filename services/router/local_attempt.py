"""One try of a request on a unified worker, which encodes and prefills by itself."""

import time
from collections.abc import Mapping

from epd.errors import InternalError
from epd.sampling import FinishReason
from epd.v1 import common_pb2, decode_pb2
from epd.wire.finish_reason import finish_reason_from_proto
from epd.wire.timings import timings_from_proto
from epd.wire.top_logprobs import tops_from_proto
from services.router.account import Booking
from services.router.attempt import Outcome, Work
from services.router.dispatch_stage import DispatchStage
from services.router.leg import run_leg
from services.router.placement import LocalPlacement


class LocalAttempt:
    """Runs the only leg.

    Args:
        work: The request.
        placement: A unified decode worker.
        request: From :func:`services.router.worker_requests.local_request`.
        dispatch: Ends with the call.
    """

    def __init__(
        self,
        work: Work,
        placement: LocalPlacement,
        request: decode_pb2.DecodeRequest,
        dispatch: DispatchStage,
    ) -> None:
        self._work = work
        self._placement = placement
        self._worker = placement.worker
        self._request = request
        self._dispatch = dispatch

    async def run(self) -> Outcome:
        """Runs until the answer or the attempt has ended.

        Raises:
            LegFailedError: the worker failed or was lost.
        """
        self._worker.breaker.begin()
        booking = self._worker.account.book(
            prompt_tokens=self._placement.prompt.tokens,
            uncached_tokens=self._placement.uncached_tokens,
        )
        self._worker.held.assume(self._placement.prompt.hashes)
        try:
            return await run_leg(self._worker, self._run(booking))
        finally:
            booking.release()

    async def _run(self, booking: Booking) -> Outcome:
        path = self._work.path
        mark_ns = self._dispatch.end()
        first_token_ns: int | None = None
        outcome: Outcome = None
        ended = False
        call = self._worker.decode.Decode(self._request, timeout=self._work.deadline.remaining_s())
        try:
            async for response in call:
                now_ns = time.monotonic_ns()
                match response.WhichOneof("event"):
                    case "started":
                        self._worker.breaker.succeeded()
                        started = response.started
                        reported = timings_from_proto(started.timings)
                        path.add_window("decode", reported, started.service_ns, now_ns - mark_ns)
                        mark_ns = now_ns
                        if started.HasField("usage"):
                            self._note_prompt(started.usage)
                    case "tokens":
                        if first_token_ns is None:
                            first_token_ns = now_ns
                            booking.computed()
                        tokens = response.tokens
                        if await self._work.sink(
                            tokens.token_ids, tokens.logprobs, tops_from_proto(tokens.top_logprobs)
                        ):
                            stopped_ns = time.monotonic_ns()
                            path.answered(stopped_ns)
                            path.add("decode.prefill", first_token_ns - mark_ns)
                            path.add("decode.decode", stopped_ns - first_token_ns)
                            return FinishReason.STOP
                    case "preempted":
                        ended = True
                    case "finished":
                        finished = response.finished
                        outcome = finish_reason_from_proto(finished.finish_reason)
                        ended = outcome is not None
                        self._note_prompt(finished.usage)
                        reported = timings_from_proto(finished.timings)
                        path.add_window("decode", reported, finished.service_ns, now_ns - mark_ns)
                        path.answered(now_ns)
                        self._learn(reported, finished.usage)
        finally:
            call.cancel()
        if not ended:
            raise InternalError(f"decode {self._worker.address} ended without saying why")
        return outcome

    def _note_prompt(self, usage: common_pb2.Usage) -> None:
        """Takes the prompt's part; before the end too, where it is known earlier."""
        self._work.cached(usage.cached_tokens)
        self._work.prompt_tokens = usage.prompt_tokens
        self._work.image_tokens = usage.image_tokens

    def _learn(self, reported: Mapping[str, int], usage: common_pb2.Usage) -> None:
        computed = max(1, usage.prompt_tokens - usage.cached_tokens)
        if prefill_ns := reported.get("prefill", 0):
            self._worker.local_speed.add(computed, prefill_ns / 1e9)
        drawn = usage.completion_tokens - 1
        if drawn > 0 and (decode_ns := reported.get("decode", 0)):
            self._worker.speed.add(self._worker.load, decode_ns / 1e9 / drawn)
