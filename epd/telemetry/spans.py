"""Spans of stages that were measured where no span could be open, such as the engine's thread."""

import time
from collections.abc import Mapping, Sequence

from opentelemetry.context import Context
from opentelemetry.trace import SpanKind, Status, StatusCode, Tracer

from epd.telemetry import semconv

Attribute = str | bool | int | float | Sequence[str] | Sequence[int]


def record_stage(
    tracer: Tracer,
    name: str,
    *,
    start_ns: int,
    end_ns: int,
    parent: Context | None = None,
    attributes: Mapping[str, Attribute] | None = None,
    error_type: str | None = None,
) -> None:
    """Records a finished INTERNAL span.

    Args:
        tracer: The service's tracer.
        name: One of ``semconv.STAGE_SPANS``.
        start_ns: ``time.monotonic_ns`` at its start.
        end_ns: ``time.monotonic_ns`` at its end.
        parent: The request's context, captured in its handler; None takes the current one. On
            another thread there is no current one, and a second root would appear.
        attributes: Facts about the stage.
        error_type: Why it failed; None when it did not.
    """
    # Spans carry wall time; the durations stay those of the monotonic clock.
    offset_ns = time.time_ns() - time.monotonic_ns()
    span = tracer.start_span(
        name,
        context=parent,
        kind=SpanKind.INTERNAL,
        attributes=attributes,
        start_time=start_ns + offset_ns,
    )
    if error_type is not None:
        span.set_attribute(semconv.ERROR_TYPE, error_type)
        span.set_status(Status(StatusCode.ERROR, error_type))
    span.end(end_ns + offset_ns)
