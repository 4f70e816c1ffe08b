"""How many retries all requests together may cause, so that a failing fleet is not asked harder."""

import time
from collections.abc import Callable


class RetryBudget:
    """A bucket of retries. Every request adds a share of one, and so does time.

    Args:
        burst: Most retries in the bucket; it starts full, so that one worker's death, which hits
            many requests at once, is survived.
        share: Added per request.
        per_s: Added per second, so that a quiet router recovers.
        clock: Seconds, monotonic.
    """

    def __init__(
        self,
        burst: float,
        share: float,
        per_s: float = 1.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._burst = burst
        self._share = share
        self._per_s = per_s
        self._clock = clock
        self._left = burst
        self._filled_at_s = clock()

    def request(self) -> None:
        """A request has come."""
        self._add(self._share)

    def take(self) -> bool:
        """One retry; False when there is none left."""
        now_s = self._clock()
        self._add((now_s - self._filled_at_s) * self._per_s)
        self._filled_at_s = now_s
        if self._left < 1.0:
            return False
        self._left -= 1.0
        return True

    def _add(self, amount: float) -> None:
        self._left = min(self._burst, self._left + amount)
