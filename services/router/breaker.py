"""Keeps requests away from a worker that answers and fails, until one of them succeeds again."""

import logging
import time
from collections.abc import Callable

from epd.errors import (
    DataLossError,
    EpdError,
    InternalError,
    PermissionDeniedError,
    TransferFailedError,
    UnavailableError,
)

_log = logging.getLogger(__name__)

#: What says something about the worker. Everything else is an answer: a bad request, a full queue,
#: an unknown handle, a deadline or a cancel would be the same on a healthy worker.
SERVER_FAULTS = (
    UnavailableError,
    TransferFailedError,
    DataLossError,
    InternalError,
    # Of a worker, which refuses this router: no client calls it directly.
    PermissionDeniedError,
)


class CircuitBreaker:
    """Opens after faults in a row; then one request at a time probes, and a success closes it.

    A probe that never ends blocks no other: the next one is let through after the same time.

    Args:
        name: Of the worker, for the log.
        faults: Server faults in a row that open it.
        open_s: Time between the opening, or a probe, and the next probe.
        clock: Seconds, monotonic.
    """

    def __init__(
        self,
        name: str,
        faults: int,
        open_s: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._name = name
        self._limit = faults
        self._open_s = open_s
        self._clock = clock
        self._faults = 0
        #: When the next probe may go; None while closed.
        self._probe_at_s: float | None = None

    @property
    def is_open(self) -> bool:
        """Whether the worker gets probes only."""
        return self._probe_at_s is not None

    @property
    def allows(self) -> bool:
        """Whether a request may go there now."""
        return self._probe_at_s is None or self._clock() >= self._probe_at_s

    def begin(self) -> None:
        """A request goes there; while open, it is the probe."""
        if self._probe_at_s is not None:
            self._probe_at_s = self._clock() + self._open_s

    def succeeded(self) -> None:
        """The worker has done what it was asked for."""
        if self._probe_at_s is not None:
            _log.info("%s works again", self._name)
        self._faults = 0
        self._probe_at_s = None

    def failed(self, error: EpdError) -> None:
        """A call there ended with an error, of whatever kind."""
        if not isinstance(error, SERVER_FAULTS):
            return
        self._faults += 1
        if self._faults < self._limit:
            return
        if self._probe_at_s is None:
            _log.warning("%s failed %d times in a row: %s", self._name, self._faults, error)
        self._probe_at_s = self._clock() + self._open_s
