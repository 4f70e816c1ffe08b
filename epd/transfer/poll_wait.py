"""How long to wait between polls."""

#: After something has moved more is likely: the next polls follow each other this closely.
SHORTEST_WAIT_S = 20e-6


class PollWait:
    """None after a poll that found something, then longer and longer up to a bound.

    A small WRITE ends microseconds after it was posted and the next notice often follows the last
    one: who sleeps the whole period first is late by it, and who never sleeps takes a core.
    """

    def __init__(self) -> None:
        self._wait_s = 0.0

    def after(self, moved: bool, longest_s: float) -> float:
        """Seconds to wait after a poll that found something, or nothing."""
        if moved:
            self._wait_s = 0.0
        else:
            self._wait_s = min(max(2 * self._wait_s, SHORTEST_WAIT_S), longest_s)
        return self._wait_s
