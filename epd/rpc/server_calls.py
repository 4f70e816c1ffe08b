"""Spans and durations of the calls that a server answers."""

import contextlib
import functools
import time
from collections.abc import Iterator, Mapping

from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.trace import Span, SpanKind, Status, StatusCode

from epd.rpc.request_context import request_id
from epd.rpc.status_name import status_name_to
from epd.telemetry import semconv
from epd.telemetry.metrics import histogram
from epd.telemetry.propagation import extract_context
from epd.telemetry.setup import Telemetry

#: Codes that are the server's fault; the others are answers.
_SERVER_ERRORS = frozenset(
    {"UNKNOWN", "DEADLINE_EXCEEDED", "UNIMPLEMENTED", "INTERNAL", "UNAVAILABLE", "DATA_LOSS"}
)


class ServerCalls:
    """A SERVER span and a duration per call.

    Args:
        telemetry: The service's.
        starts_traces: Whether a call without a caller's context begins a trace. True for the
            router only: on workers such calls are upkeep that belongs to no request.
    """

    def __init__(self, telemetry: Telemetry, *, starts_traces: bool) -> None:
        self._tracer = telemetry.tracer
        self._duration = histogram(telemetry.meter, semconv.RPC_SERVER_CALL_DURATION)
        self._starts_traces = starts_traces

    def begin(self, method: str, caller: Context) -> Span:
        """The span of a call of ``method`` (no leading slash)."""
        called = trace.get_current_span(caller).get_span_context().is_valid
        if not called and not self._starts_traces:
            return trace.INVALID_SPAN
        return self._tracer.start_span(
            method,
            context=caller,
            kind=SpanKind.SERVER,
            attributes={semconv.RPC_SYSTEM_NAME: "grpc", semconv.RPC_METHOD: method},
        )

    def end(self, span: Span, method: str, started_ns: int, code: str) -> None:
        """The call has ended with a status code, by its name."""
        _end_span(span, code)
        attributes = {
            semconv.RPC_SYSTEM_NAME: "grpc",
            semconv.RPC_METHOD: method,
            semconv.RPC_RESPONSE_STATUS_CODE: code,
        }
        if code in _SERVER_ERRORS:
            attributes[semconv.ERROR_TYPE] = code
        self._duration.record((time.monotonic_ns() - started_ns) / 1e9, attributes)

    @contextlib.contextmanager
    def message(self, method: str, headers: Mapping[str, str]) -> Iterator[None]:
        """Around the answer to a message of a kept stream that stands for a call of ``method``."""
        started_ns = time.monotonic_ns()
        span = self.begin(method, extract_context(headers.items()))
        with (
            status_name_to(functools.partial(self.end, span, method, started_ns)),
            trace.use_span(span, record_exception=False, set_status_on_exception=False),
        ):
            yield


def _end_span(span: Span, code: str) -> None:
    outcome = {"OK": semconv.OUTCOME_OK, "CANCELLED": semconv.OUTCOME_CANCELLED}
    span.set_attribute(semconv.RPC_RESPONSE_STATUS_CODE, code)
    span.set_attribute(semconv.EPD_OUTCOME, outcome.get(code, semconv.OUTCOME_ERROR))
    if request_id():
        span.set_attribute(semconv.EPD_REQUEST_ID, request_id())
    if code in _SERVER_ERRORS:
        span.set_attribute(semconv.ERROR_TYPE, code)
        span.set_status(Status(StatusCode.ERROR))
    span.end()
