"""KV of a prompt that is still on its way. Plain Python, no torch."""

import threading
import time
from collections.abc import Callable

#: Weight of the newest WRITE in the pace.
_NEWEST = 0.25


class KvArrival:
    """Which layers of one prompt's KV are in place, and when the others are to be expected.

    A layer comes in as many WRITEs as prefill had steps, about in the order in which they were
    made: step by step, layer by layer. How many is known once prefill is through; until then no
    layer counts as in place. The hand-over's event loop fills this in, the engine thread asks.

    Args:
        layer_count: Layers.
        clock_ns: A monotonic clock.
    """

    def __init__(self, layer_count: int, clock_ns: Callable[[], int] = time.monotonic_ns) -> None:
        self._clock_ns = clock_ns
        self._writes = [0] * layer_count
        self._expected: int | None = None
        self._last_ns = 0
        #: Time that one WRITE of one layer takes. Where the wire waits for prefill it is prefill's:
        #: too long, so that nobody starts too early.
        self._pace_ns = 0.0
        self._ended = False
        self._changed = threading.Condition()

    def note(self, layers: range) -> None:
        """A WRITE of some layers is in place."""
        now = self._clock_ns()
        if self._last_ns:
            each = (now - self._last_ns) / len(layers)
            self._pace_ns += _NEWEST * (each - self._pace_ns) if self._pace_ns else each
        self._last_ns = now
        with self._changed:
            for layer in layers:
                self._writes[layer] += 1
            self._changed.notify_all()

    def expect(self, writes_per_layer: int) -> None:
        """Prefill is through: so many WRITEs of each layer make it complete."""
        with self._changed:
            self._expected = writes_per_layer
            self._changed.notify_all()

    @property
    def expected_writes(self) -> int | None:
        """How many WRITEs of single layers make everything complete; None while that is unknown."""
        return None if self._expected is None else self._expected * len(self._writes)

    def end(self) -> None:
        """Nothing more comes; whoever waits for a layer waits in vain."""
        with self._changed:
            self._ended = True
            self._changed.notify_all()

    @property
    def ended(self) -> bool:
        """Whether nothing more comes."""
        return self._ended

    def has(self, layer: int) -> bool:
        """Whether all of a layer is in place."""
        return self._expected is not None and self._writes[layer] >= self._expected

    def wait(self, layer: int, timeout_s: float) -> bool:
        """Waits until all of a layer is in place; whether it is."""
        with self._changed:
            self._changed.wait_for(lambda: self.has(layer) or self._ended, timeout_s)
            return self.has(layer)

    def remaining_s(self) -> float | None:
        """Predicted seconds until everything is in place; None while that cannot be told."""
        if self._expected is None or self._ended:
            return None
        left = self._missing()
        if left and not self._pace_ns:
            return None
        return self._due_s(left)

    def due_within(self, step_s: float) -> bool:
        """Whether everything is predicted to be in place in less than so long."""
        left_s = self.remaining_s()
        return left_s is not None and left_s < step_s

    def in_time(self, step_s: float) -> bool:
        """Whether a step of so long, begun now, is predicted to wait at no layer."""
        if self.remaining_s() is None:
            return False
        last, left = len(self._writes) - 1, self._missing()
        first = next((layer for layer in range(last + 1) if not self.has(layer)), None)
        if first is None:
            return True
        # The layers between them are due, and needed, at even distances.
        return all(
            self._due_s(left - (last - layer)) <= step_s * layer / (last + 1)
            for layer in (first, last)
        )

    def _missing(self) -> int:
        """WRITEs of single layers still to come."""
        assert self._expected is not None
        return sum(max(self._expected - writes, 0) for writes in self._writes)

    def _due_s(self, writes: int) -> float:
        """Predicted seconds until so many more are in place."""
        if not writes:
            return 0.0
        return max(writes * self._pace_ns - (self._clock_ns() - self._last_ns), 0.0) / 1e9
