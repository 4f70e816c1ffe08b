"""What the router itself takes to send an attempt to its workers: a stage and a span."""

import time

from opentelemetry.trace import Tracer

from epd.telemetry import semconv
from epd.telemetry.spans import record_stage
from services.router.critical_path import ROUTER_DISPATCH, CriticalPath


class DispatchStage:
    """Runs from when everything is known that workers are chosen by, until they are called.

    Args:
        path: Of the request.
        tracer: The router's.
    """

    def __init__(self, path: CriticalPath, tracer: Tracer) -> None:
        self._path = path
        self._tracer = tracer
        self.started_ns = time.monotonic_ns()

    def begin(self) -> None:
        """Begins anew: what was before is another stage's time."""
        self.started_ns = time.monotonic_ns()

    def end(self) -> int:
        """The workers are about to be called; returns the moment, by ``time.monotonic_ns``."""
        record_stage(
            self._tracer,
            semconv.SPAN_DISPATCH,
            start_ns=self.started_ns,
            end_ns=time.monotonic_ns(),
        )
        end_ns = time.monotonic_ns()
        self._path.add(ROUTER_DISPATCH, end_ns - self.started_ns)
        return end_ns
