"""The life of one request: attempts until the answer is complete."""

import asyncio
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from opentelemetry.metrics import Counter

from epd.errors import DeadlineExceededError, EpdError, ResourceExhaustedError, UnavailableError
from epd.sampling import FinishReason, TopLogprobs
from services.router.attempt import Work
from services.router.calls import Completion, Usage
from services.router.dispatcher import Dispatcher
from services.router.leg import LegFailedError
from services.router.output import OutputStream
from services.router.retry import RetryPolicy, lost_finish
from services.router.retry_budget import RetryBudget
from services.router.routes import Routes
from services.router.workers import Role

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class GenerationBounds:
    """What ends an answer besides its workers.

    Args:
        first_token_timeout_s: Longest time to the first token.
        context_length: Most tokens of prompt and output.
        end_ids: Tokens that end this request's answer.
    """

    first_token_timeout_s: float
    context_length: int
    end_ids: frozenset[int]


class Generation:
    """Drives one request.

    A failed attempt is repeated on other workers as far as the policy allows. Before the first
    token the client notices nothing; after it prompt and emitted tokens are replayed, and since
    sampling depends on seed and position only, the answer goes on as if nothing had happened.

    Args:
        work: The request; this object becomes its sink.
        output: Takes the tokens.
        routes: Knows whether another worker is left to try.
        dispatcher: Runs attempts.
        policy: When to try again.
        bounds: Further ends.
        budget: What all requests' retries come from.
        retries: Counts attempts after the first.
        on_first_token: Called once each, when the first token is there.
    """

    def __init__(
        self,
        work: Work,
        output: OutputStream,
        routes: Routes,
        dispatcher: Dispatcher,
        policy: RetryPolicy,
        bounds: GenerationBounds,
        budget: RetryBudget,
        retries: Counter,
        on_first_token: Sequence[Callable[[], None]],
    ) -> None:
        work.sink = self._take_first
        self._work = work
        self._output = output
        self._routes = routes
        self._dispatcher = dispatcher
        self._policy = policy
        self._bounds = bounds
        self._budget = budget
        self._retries = retries
        self._on_first_token = on_first_token
        self._attempts = 0
        self._failures = 0
        self._exhausted = 0
        self._timeout: asyncio.Timeout | None = None

    async def run(self) -> Completion:
        """Runs to the end; the tokens go to the output as they come.

        Raises:
            EpdError: what the client is to see.
        """
        deadline = self._work.deadline
        budget_s = min(self._bounds.first_token_timeout_s, deadline.remaining_s())
        try:
            async with asyncio.timeout(budget_s) as self._timeout:
                reason = await self._until_finished()
        except TimeoutError:
            if self._work.emitted or deadline.passed:
                raise deadline.error() from None
            raise DeadlineExceededError(
                f"no token within {self._bounds.first_token_timeout_s:g} s",
                reason="FIRST_TOKEN_TIMEOUT",
            ) from None
        if self._output.flush():
            reason = FinishReason.STOP
        return self._completion(reason)

    async def _until_finished(self) -> FinishReason:
        self._budget.request()
        while True:
            self._attempts += 1
            if self._attempts > 1:
                self._retries.add(1)
            emitted_before = len(self._work.emitted)
            self._work.path.begin_attempt()
            try:
                outcome = await self._dispatcher.attempt(self._work)
            except LegFailedError as failure:
                self._work.path.attempt_failed()
                self._work.avoid.add(failure.worker.info.instance_id)
                lost = self._lost_finish()
                if lost is not None:
                    return lost
                self._note_failure(failure.error, failure.worker.role)
            else:
                if outcome is not None:
                    return outcome
                # A preempted request that has gained a token will end: it is no failure.
                if len(self._work.emitted) == emitted_before:
                    error = UnavailableError("preempted too often", reason="PREEMPTED")
                    self._note_failure(error, Role.DECODE)
            await asyncio.sleep(self._policy.wait_s(self._failures))

    def _note_failure(self, error: EpdError, role: Role) -> None:
        """Counts a failed attempt; raises its error when there shall be no other."""
        self._failures += 1
        self._exhausted += isinstance(error, ResourceExhaustedError)
        again = self._policy.may_retry(
            error,
            failures=self._failures,
            exhausted=self._exhausted,
            alternatives=self._routes.has_alternatives(role, self._work.avoid),
            started=bool(self._work.emitted),
        )
        if not again:
            raise error
        if not self._budget.take():
            _log.warning("attempt %d failed and no retry is left in the budget", self._attempts)
            raise error
        _log.warning("attempt %d failed, trying again: %s", self._attempts, error)

    def _lost_finish(self) -> FinishReason | None:
        work = self._work
        return lost_finish(
            work.emitted,
            max_tokens=work.sampling.max_tokens,
            room=self._bounds.context_length - work.prompt_tokens,
            end_ids=self._bounds.end_ids,
        )

    async def _take_first(
        self, token_ids: Sequence[int], logprobs: Sequence[float], tops: Sequence[TopLogprobs]
    ) -> bool:
        """Notes the first token; all that follow go straight to the output."""
        if token_ids:
            self._work.sink = self._output.push
            self._work.path.first_token()
            for call in self._on_first_token:
                call()
            assert self._timeout is not None
            loop = asyncio.get_running_loop()
            self._timeout.reschedule(loop.time() + self._work.deadline.remaining_s())
        return await self._output.push(token_ids, logprobs, tops)

    def _completion(self, reason: FinishReason) -> Completion:
        work = self._work
        return Completion(
            finish_reason=reason,
            usage=Usage(
                prompt_tokens=work.prompt_tokens,
                completion_tokens=len(work.emitted),
                cached_tokens=work.cached_tokens or 0,
                image_tokens=work.image_tokens,
            ),
            timings_ns=work.path.stages_ns(),
            ttft_ns=work.path.ttft_ns,
            request_id=work.request_id,
            attempt_count=self._attempts,
        )
