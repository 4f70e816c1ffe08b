"""What one router has sent to one worker and what the worker says it has: the load, in numbers."""

import contextlib
import time
from collections.abc import Iterator
from dataclasses import dataclass


@dataclass(frozen=True)
class LoadReport:
    """The part of a worker's own report that routing uses; counts."""

    requests: int
    waiting_tokens: int = 0
    free_blocks: int = 0
    total_blocks: int = 0


class Booking:
    """Work of one request at one worker, from dispatch on. Released once, on whatever path."""

    def __init__(
        self, account: "WorkerAccount", requests: int, prompt_tokens: int, uncached_tokens: int
    ) -> None:
        self._account = account
        self._requests = requests
        self._prompt_tokens = prompt_tokens
        self._uncached_tokens = uncached_tokens
        self._computing = prompt_tokens > 0
        self._booked_ns = time.monotonic_ns()

    def computed(self) -> float:
        """The prompt is computed: its tokens wait no more.

        Returns:
            For how many seconds the worker can have worked on it: since this prompt was sent or
            the one before it was done, whichever came later.
        """
        now_ns = time.monotonic_ns()
        started_ns = max(self._booked_ns, self._account.last_computed_ns)
        self._account.last_computed_ns = now_ns
        self._stop_computing()
        return (now_ns - started_ns) / 1e9

    def release(self) -> None:
        """The worker has nothing of the request any more."""
        self._stop_computing()
        self._account.in_flight -= self._requests
        self._requests = 0

    def _stop_computing(self) -> None:
        if self._computing:
            self._computing = False
            self._account.own_prompts -= 1
            self._account.own_prompt_tokens -= self._prompt_tokens
            self._account.own_uncached_tokens -= self._uncached_tokens


class WorkerAccount:
    """Load of one worker. Exact for what this router has sent, reported for what others have.

    A report counts this router's work too, so only what exceeds it is taken for others'.
    """

    def __init__(self) -> None:
        #: Requests (encoder: images) of this router that are there or on their way.
        self.in_flight = 0
        #: Prompts of this router that are not computed yet, their tokens, and those not cached.
        self.own_prompts = 0
        self.own_prompt_tokens = 0
        self.own_uncached_tokens = 0
        self.last_computed_ns = 0
        self._foreign_requests = 0
        self._foreign_tokens = 0
        self._report = LoadReport(0)
        self._blocks_since_report = 0

    @property
    def load(self) -> int:
        """Requests there or on their way, as far as known."""
        return self.in_flight + self._foreign_requests

    @property
    def waiting_tokens(self) -> int:
        """Uncached prompt tokens ahead of a new request."""
        return self.own_uncached_tokens + self._foreign_tokens

    @property
    def waiting_prompts(self) -> int:
        """Prompts ahead of a new request; others' waiting tokens count as one."""
        return self.own_prompts + (self._foreign_tokens > 0)

    @property
    def free_blocks(self) -> int | None:
        """KV blocks that a new request could get; None before the worker has said how many."""
        if not self._report.total_blocks:
            return None
        return max(0, self._report.free_blocks - self._blocks_since_report)

    def report(self, report: LoadReport) -> None:
        """Takes a worker's own count."""
        self._report = report
        self._foreign_requests = max(0, report.requests - self.in_flight)
        self._foreign_tokens = max(0, report.waiting_tokens - self.own_prompt_tokens)
        self._blocks_since_report = 0

    def book(
        self,
        requests: int = 1,
        *,
        prompt_tokens: int = 0,
        uncached_tokens: int = 0,
        blocks: int = 0,
    ) -> Booking:
        """Counts work as sent.

        Args:
            requests: Requests or images.
            prompt_tokens: Tokens of a prompt to be computed there.
            uncached_tokens: Those of them that its cache probably does not hold.
            blocks: KV blocks it will take.
        """
        self.in_flight += requests
        self.own_prompts += prompt_tokens > 0
        self.own_prompt_tokens += prompt_tokens
        self.own_uncached_tokens += uncached_tokens
        self._blocks_since_report += blocks
        return Booking(self, requests, prompt_tokens, uncached_tokens)

    @contextlib.contextmanager
    def booked(self, requests: int = 1, *, blocks: int = 0) -> Iterator[Booking]:
        """As :meth:`book`, released when the block is left, however that happens."""
        booking = self.book(requests, blocks=blocks)
        try:
            yield booking
        finally:
            booking.release()
