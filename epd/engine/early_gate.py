"""Holds a step whose KV is still on its way to the layers that have arrived."""

import time
from collections.abc import Callable, Sequence

from epd.engine.sequence import Sequence as TokenSequence

#: A wait looks this often whether somebody else has come.
_SLICE_S = 0.001


class LateError(Exception):
    """The only run of a step has come to a layer that is not there. Never leaves the engine."""


class EarlyGate:
    """Asked before each layer of a step with early runs.

    In company no run is waited for: one whose layer is not there is late, goes on over whatever
    lies in its blocks, and what it draws is worth nothing. Rows of a step do not touch each other.
    Alone it is waited for, until the patience ends or somebody else could use the next step.

    Args:
        sequences: Of the early runs.
        patience_s: Longest wait in all; 0 in company.
        wanted: Whether the next step would have something else to do.
    """

    def __init__(
        self, sequences: Sequence[TokenSequence], patience_s: float, wanted: Callable[[], bool]
    ) -> None:
        self.late: set[TokenSequence] = set()
        self._in_time = list(sequences)
        self._patience_s = patience_s
        self._wanted = wanted

    def before_layer(self, layer: int) -> None:
        """Waits, or notes who is late.

        Raises:
            LateError: nothing of the step is of use any more.
        """
        for sequence in tuple(self._in_time):
            arrival = sequence.request.arrival
            assert arrival is not None
            if arrival.has(layer) or (self._patience_s and self._wait(sequence, layer)):
                continue
            self._in_time.remove(sequence)
            self.late.add(sequence)
            if self._patience_s:
                raise LateError

    def _wait(self, sequence: TokenSequence, layer: int) -> bool:
        arrival = sequence.request.arrival
        assert arrival is not None
        started = time.monotonic()
        ends = started + self._patience_s
        while not arrival.wait(layer, _SLICE_S):
            if arrival.ended or time.monotonic() > ends or self._wanted():
                return False
        self._patience_s = max(ends - time.monotonic(), _SLICE_S)
        return True
