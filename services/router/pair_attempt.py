"""One try of a request on a prefill and a decode worker.

Both calls are opened at the same time. Prefill's first token goes to the client at once; decode's
tokens follow it. The first leg that fails ends the other, and prefill's error is preferred: what
decode says then is only its consequence.
"""

import asyncio
import contextlib
import time
from collections.abc import Callable

from epd.cleanup import CleanupTasks, cancel_and_wait
from epd.errors import InternalError
from epd.sampling import FinishReason
from epd.v1 import decode_pb2, prefill_pb2
from epd.wire.finish_reason import finish_reason_from_proto
from epd.wire.timings import timings_from_proto
from epd.wire.top_logprobs import tops_from_proto
from services.router.account import Booking
from services.router.attempt import Outcome, Work
from services.router.critical_path import KV_HANDOVER
from services.router.dispatch_stage import DispatchStage
from services.router.leg import run_leg
from services.router.placeholders import ExpandedPrompt
from services.router.placement import Placement, moved_tokens
from services.router.speed import MeasuredLine
from services.router.worker_requests import decode_request, prefill_request


class PairAttempt:
    """Runs the two legs of one attempt.

    Args:
        work: The request.
        expanded: Its prompt with placeholders.
        placement: The chosen workers.
        transfer_id: Fresh, 128 random bits in hexadecimal.
        transfer: Learns how long the hand-over takes.
        dispatch: Ends with the calls.
        on_embeddings_read: Called at the first token: the prefill worker has read all embeddings.
    """

    def __init__(
        self,
        work: Work,
        expanded: ExpandedPrompt,
        placement: Placement,
        transfer_id: str,
        transfer: MeasuredLine,
        dispatch: DispatchStage,
        on_embeddings_read: Callable[[], None],
    ) -> None:
        self._work = work
        self._placement = placement
        self._prefill = placement.prefill
        self._decode = placement.decode
        self._prefill_request = prefill_request(work, expanded, transfer_id, placement.decode)
        self._decode_request = decode_request(work, expanded, transfer_id)
        self._transfer = transfer
        self._moved_tokens = moved_tokens(placement.prompt, placement.decode)
        self._dispatch = dispatch
        self._on_embeddings_read = on_embeddings_read
        self._outcome: asyncio.Future[Outcome] = asyncio.get_running_loop().create_future()
        self._first_token_sent = asyncio.Event()
        self._first_token_ns = 0
        self._started_ns: int | None = None
        self._queue_ns = 0
        self._decoded_tokens = 0

    async def run(
        self, cleanup: CleanupTasks, *, culprit_grace_s: float, linger_s: float
    ) -> Outcome:
        """Runs until the answer or the attempt has ended.

        Args:
            cleanup: Takes over a prefill call that has nothing left to do but to report.
            culprit_grace_s: How long a failed decode leg waits for prefill to tell the cause.
            linger_s: How long a prefill call may take to report.

        Raises:
            LegFailedError: the leg that is to blame.
        """
        with contextlib.ExitStack() as bookings:
            booking = self._book(bookings)
            prefill = asyncio.create_task(run_leg(self._prefill, self._run_prefill(booking)))
            decode = asyncio.create_task(run_leg(self._decode, self._run_decode()))
            tasks = {prefill, decode}
            try:
                outcome = await self._first_outcome(prefill, decode, culprit_grace_s)
                if not prefill.done():
                    tasks.remove(prefill)
                    cleanup.spawn(_linger(prefill, linger_s))
                return outcome
            finally:
                await cancel_and_wait(*tasks)

    def _book(self, bookings: contextlib.ExitStack) -> Booking:
        """Books both workers until the stack is left; returns the booking at prefill."""
        placement = self._placement
        self._prefill.breaker.begin()
        self._decode.breaker.begin()
        bookings.enter_context(self._decode.account.booked(blocks=placement.blocks))
        booking = self._prefill.account.book(
            prompt_tokens=placement.prompt.tokens, uncached_tokens=placement.uncached_tokens
        )
        bookings.callback(booking.release)
        self._prefill.held.assume(placement.prompt.hashes)
        return booking

    async def _first_outcome(
        self,
        prefill: "asyncio.Task[None]",
        decode: "asyncio.Task[None]",
        culprit_grace_s: float,
    ) -> Outcome:
        waiting: set[asyncio.Future[object]] = {self._outcome, prefill, decode}  # type: ignore[arg-type]
        while True:
            await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            if self._outcome.done():
                return self._outcome.result()
            if decode.done() and not self._handed_over and not prefill.done():
                await asyncio.wait({prefill}, timeout=culprit_grace_s)
                if self._outcome.done():  # its first token was the last one
                    return self._outcome.result()
            if prefill.done():
                waiting.discard(prefill)
                if not self._handed_over:
                    prefill.result()
            if decode.done():
                decode.result()
                raise AssertionError("a decode leg ends with an outcome or an error")

    @property
    def _handed_over(self) -> bool:
        """Decode has everything: whatever becomes of prefill does no harm any more."""
        return self._started_ns is not None and self._first_token_sent.is_set()

    async def _run_prefill(self, booking: Booking) -> None:
        opened_ns = self._dispatch.end()
        call = self._prefill.prefill.Prefill(
            self._prefill_request, timeout=self._work.deadline.remaining_s()
        )
        try:
            async for response in call:
                if response.WhichOneof("event") == "first_token":
                    self._first_token_ns = time.monotonic_ns()
                    self._learn_prefill(response.first_token, booking.computed())
                    stopped = await self._take_first_token(response.first_token, opened_ns)
                    if stopped:
                        return  # a stop string: nobody needs the push any more
        finally:
            call.cancel()
            booking.release()
        if not self._first_token_sent.is_set():
            raise InternalError(f"prefill {self._prefill.address} ended without a token")

    def _learn_prefill(self, first: prefill_pb2.FirstToken, busy_s: float) -> None:
        """Takes the measured speed and that the prompt is cached there from now on.

        Of several prompts in one step each reports the whole step, and from here the time includes
        waits that are not the worker's: the shorter account is the better one.
        """
        computed_ns = timings_from_proto(first.timings).get("prefill", 0)
        if computed_ns:
            computed = max(1, self._placement.prompt.tokens - first.cached_tokens)
            self._prefill.speed.add(computed, min(computed_ns / 1e9, busy_s))
        self._prefill.held.assume(self._placement.prompt.hashes)

    async def _take_first_token(self, first: prefill_pb2.FirstToken, opened_ns: int) -> bool:
        self._on_embeddings_read()
        self._work.cached(first.cached_tokens)
        self._work.path.add_window(
            "prefill",
            timings_from_proto(first.timings),
            first.service_ns,
            self._first_token_ns - opened_ns,
        )
        tops = [first.top_logprobs] if first.HasField("top_logprobs") else []
        stopped = await self._work.sink([first.token_id], [first.logprob], tops_from_proto(tops))
        reason = FinishReason.STOP if stopped else finish_reason_from_proto(first.finish_reason)
        if reason is not None:
            self._work.path.answered(self._first_token_ns)
            self._end(reason)
        self._first_token_sent.set()
        return stopped

    async def _run_decode(self) -> None:
        call = self._decode.decode.Decode(
            self._decode_request, timeout=self._work.deadline.remaining_s()
        )
        outcome: Outcome = None
        ended = False
        finished: decode_pb2.Finished | None = None
        try:
            async for response in call:
                match response.WhichOneof("event"):
                    case "tokens":
                        # The two streams are not ordered with each other.
                        if not self._first_token_sent.is_set():
                            await self._first_token_sent.wait()
                        tokens = response.tokens
                        token_ids = tokens.token_ids
                        self._decoded_tokens += len(token_ids)
                        tops = tops_from_proto(tokens.top_logprobs)
                        if await self._work.sink(token_ids, tokens.logprobs, tops):
                            outcome, ended = FinishReason.STOP, True
                            break
                    case "started":
                        self._started_ns = time.monotonic_ns()
                        self._decode.breaker.succeeded()
                        reported = timings_from_proto(response.started.timings)
                        self._queue_ns = reported.get("queue", 0)
                    case "preempted":
                        ended = True
                    case "finished":
                        finished = response.finished
                        outcome = finish_reason_from_proto(finished.finish_reason)
                        ended = outcome is not None
        finally:
            call.cancel()
        if not ended:
            raise InternalError(f"decode {self._decode.address} ended without saying why")
        await self._first_token_sent.wait()
        self._account(finished)
        self._end(outcome)

    def _account(self, finished: decode_pb2.Finished | None) -> None:
        """Divides the time since the first token into hand-over, queue and decode."""
        now_ns = time.monotonic_ns()
        reported = {} if finished is None else timings_from_proto(finished.timings)
        # Started may be read late, together with tokens. The worker has decoded for as long as it
        # says, so it had begun by then.
        started_ns = min(self._started_ns or now_ns, now_ns - reported.get("decode", 0))
        started_ns = max(started_ns, self._first_token_ns)
        handover_ns = started_ns - self._first_token_ns
        queue_ns = min(self._queue_ns, handover_ns)
        path = self._work.path
        path.answered(now_ns)
        path.add(KV_HANDOVER, handover_ns - queue_ns)
        if self._started_ns is not None:  # else it was preempted in decode's queue
            self._transfer.add(self._moved_tokens, (handover_ns - queue_ns) / 1e9)
        path.add("decode.queue", queue_ns)
        since_start_ns = now_ns - started_ns
        if finished is None:  # a stop string, or preempted
            path.add("decode.decode", since_start_ns)
        else:
            path.add_window("decode", reported, finished.service_ns, since_start_ns)
            if self._decoded_tokens > 1:
                token_s = reported.get("decode", since_start_ns) / 1e9 / self._decoded_tokens
                self._decode.speed.add(self._decode.load, token_s)

    def _end(self, outcome: Outcome) -> None:
        if not self._outcome.done():
            self._outcome.set_result(outcome)


async def _linger(prefill: "asyncio.Task[None]", linger_s: float) -> None:
    await asyncio.wait({prefill}, timeout=linger_s)
    await cancel_and_wait(prefill)
