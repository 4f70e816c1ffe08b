"""One try of a request on a unified worker, which encodes and prefills by itself."""

import time

from epd.errors import InternalError
from epd.sampling import FinishReason
from epd.v1 import decode_pb2
from epd.wire.finish_reason import finish_reason_from_proto
from epd.wire.timings import timings_from_proto
from epd.wire.top_logprobs import tops_from_proto
from services.router.attempt import Outcome, Work
from services.router.leg import run_leg
from services.router.workers import Worker


class LocalAttempt:
    """Runs the only leg.

    Args:
        work: The request.
        worker: A unified decode worker.
        request: From :func:`services.router.worker_requests.local_request`.
    """

    def __init__(self, work: Work, worker: Worker, request: decode_pb2.DecodeRequest) -> None:
        self._work = work
        self._worker = worker
        self._request = request

    async def run(self) -> Outcome:
        """Runs until the answer or the attempt has ended.

        Raises:
            LegFailedError: the worker failed or was lost.
        """
        self._worker.breaker.begin()
        with self._worker.account.booked():
            return await run_leg(self._worker, self._run())

    async def _run(self) -> Outcome:
        path = self._work.path
        mark_ns = time.monotonic_ns()
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
                    case "tokens":
                        first_token_ns = first_token_ns or now_ns
                        tokens = response.tokens
                        if await self._work.sink(
                            tokens.token_ids, tokens.logprobs, tops_from_proto(tokens.top_logprobs)
                        ):
                            path.add("decode.prefill", first_token_ns - mark_ns)
                            path.add("decode.decode", time.monotonic_ns() - first_token_ns)
                            return FinishReason.STOP
                    case "preempted":
                        ended = True
                    case "finished":
                        finished = response.finished
                        outcome = finish_reason_from_proto(finished.finish_reason)
                        ended = outcome is not None
                        self._work.cached(finished.usage.cached_tokens)
                        self._work.prompt_tokens = finished.usage.prompt_tokens
                        self._work.image_tokens = finished.usage.image_tokens
                        reported = timings_from_proto(finished.timings)
                        path.add_window("decode", reported, finished.service_ns, now_ns - mark_ns)
        finally:
            call.cancel()
        if not ended:
            raise InternalError(f"decode {self._worker.address} ended without saying why")
        return outcome
