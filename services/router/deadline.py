"""A point in time that a request must not pass, on this process's own clock."""

import time

from epd.errors import DeadlineExceededError


class Deadline:
    """Ends ``timeout_s`` seconds after construction. Handed on as what remains, never as a time."""

    def __init__(self, timeout_s: float) -> None:
        self.timeout_s = timeout_s
        self._ends_s = time.monotonic() + timeout_s

    def remaining_s(self) -> float:
        """Seconds left.

        Raises:
            DeadlineExceededError: none is left.
        """
        left = self._ends_s - time.monotonic()
        if left <= 0:
            raise self.error()
        return left

    @property
    def passed(self) -> bool:
        """True when nothing is left."""
        return time.monotonic() >= self._ends_s

    def error(self) -> DeadlineExceededError:
        """What a request that runs into the deadline ends with."""
        return DeadlineExceededError(f"not finished within {self.timeout_s:g} s")
