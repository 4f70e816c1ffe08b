"""How long things take, learnt from how long they took."""

import time
from collections.abc import Callable

#: An outlier (a page fault, a stopped process) counts as no more than so many times the expected.
_OUTLIER = 10.0
#: And as no more than so many times what the worker was known for: the first prompt of a new
#: process is far slower than any later one, and must not keep requests away from it for long.
_SURPRISE = 2.0
#: What a measurement still counts after the next one: about the last fifty matter.
_FADE = 0.98
#: Measurements that a worker needs before its own speed outweighs the fleet's.
_TRUST = 4.0


class MeasuredLine:
    """``seconds = base + slope * amount``, fitted to measurements that fade with age.

    Starts as a guess that some measurements outweigh.

    Args:
        base: First guess, in seconds.
        slope: First guess, in seconds per unit of the amount.
        typical: An amount that is usual, to give the guess its weight.
        half_life_s: Age at which a measurement counts half.
        clock: Seconds, monotonic.
    """

    def __init__(
        self,
        base: float,
        slope: float,
        typical: float,
        half_life_s: float = 60.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.base = base
        self.slope = slope
        self.clock = clock
        self.half_life_s = half_life_s
        self._updated_s = clock()
        self._weight = self._x = self._y = self._xx = self._xy = 0.0
        for amount in (0.0, typical):
            self._sum(amount, base + slope * amount, 0.5)

    def seconds(self, amount: float, count: int = 1) -> float:
        """Expected time of ``count`` pieces of work of ``amount`` together."""
        return self.base * count + self.slope * amount

    def add(self, amount: float, seconds: float) -> None:
        """Takes a measurement."""
        now = self.clock()
        fade = _FADE * 0.5 ** ((now - self._updated_s) / self.half_life_s)
        self._updated_s = now
        for name in ("_weight", "_x", "_y", "_xx", "_xy"):
            setattr(self, name, getattr(self, name) * fade)
        self._sum(amount, seconds, 1.0)
        self._fit()

    def _sum(self, amount: float, seconds: float, weight: float) -> None:
        self._weight += weight
        self._x += weight * amount
        self._y += weight * seconds
        self._xx += weight * amount * amount
        self._xy += weight * amount * seconds

    def _fit(self) -> None:
        """Least squares, with neither part negative."""
        mean_x, mean_y = self._x / self._weight, self._y / self._weight
        variance = self._xx / self._weight - mean_x * mean_x
        covariance = self._xy / self._weight - mean_x * mean_y
        slope = covariance / variance if variance > 1e-9 * (mean_x * mean_x + 1.0) else 0.0
        if slope < 0.0:
            self.slope, self.base = 0.0, mean_y
        elif slope * mean_x > mean_y:
            self.slope, self.base = mean_y / mean_x, 0.0
        else:
            self.slope, self.base = slope, mean_y - slope * mean_x


class WorkerSpeed:
    """One worker against the line of all. One that is not measured goes back to the fleet's speed.

    Args:
        line: Shared by all workers that do the same.
    """

    def __init__(self, line: MeasuredLine) -> None:
        self._line = line
        self._weight = 0.0
        self._ratios = 0.0
        self._updated_s = line.clock()

    @property
    def factor(self) -> float:
        """Times as long as the fleet takes."""
        fade = self._fade()
        return (self._ratios * fade + _TRUST) / (self._weight * fade + _TRUST)

    def seconds(self, amount: float, count: int = 1) -> float:
        """Expected time here."""
        return self.factor * self._line.seconds(amount, count)

    def add(self, amount: float, seconds: float) -> None:
        """Takes a measurement."""
        expected = self._line.seconds(amount)
        factor, fade = self.factor, self._fade()
        ratio = seconds / expected if expected > 0 else 1.0
        ratio = min(max(ratio, factor / _SURPRISE), factor * _SURPRISE)
        self._weight = self._weight * fade * _FADE + 1.0
        self._ratios = self._ratios * fade * _FADE + ratio
        self._updated_s = self._line.clock()
        self._line.add(amount, min(seconds, _OUTLIER * expected) if expected > 0 else seconds)

    def _fade(self) -> float:
        age_s = self._line.clock() - self._updated_s
        return float(0.5 ** (age_s / self._line.half_life_s))
