"""When the way that is not preferred is tried: what is never taken is never measured."""

import time
from collections.abc import Callable
from dataclasses import dataclass

from services.router.disaggregation import Costs, Way

#: Requests of a size between two tries of the other way, times how much dearer it is.
EVERY = 32
#: Time without a try in which what is believed of the other way counts half.
HALF_LIFE_S = 60.0


@dataclass
class _Untried:
    """Since when, and for how many requests, the other way has not been taken."""

    since_s: float
    requests: int = 0


class Exploration:
    """Takes a request now and then the other way, so that no wrong measurement lasts.

    A way that seems ``r`` times as dear is tried once per ``every * r`` requests: whatever has been
    measured, tries add at most the ``1 / every`` part to what all requests wait. What is
    believed of it halves with each half-life, so a wild measurement keeps it away for minutes,
    not for good. A measurement of a try counts as any other; it alone may change the preference.

    Args:
        every: Requests between two tries of a way that is as cheap.
        half_life_s: Age at which the excess of the other way's cost counts half.
        clock: Seconds, monotonic.
    """

    def __init__(
        self,
        every: int = EVERY,
        half_life_s: float = HALF_LIFE_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._every = every
        self._half_life_s = half_life_s
        self._clock = clock
        self._untried: dict[tuple[Way, int], _Untried] = {}

    def due(self, preferred: Way, costs: Costs, size: int) -> bool:
        """Counts a request of a size class; whether it shall go the way that is not preferred."""
        now_s = self._clock()
        other = preferred.other
        # What is preferred is measured all the time.
        self._untried.pop((preferred, size), None)
        untried = self._untried.setdefault((other, size), _Untried(now_s))
        untried.requests += 1
        age = (now_s - untried.since_s) / self._half_life_s
        dearer = costs.of(other) / costs.of(preferred) if costs.of(preferred) > 0 else 1.0
        if untried.requests <= self._every * max(1.0, dearer * 0.5**age):
            return False
        del self._untried[other, size]
        return True
