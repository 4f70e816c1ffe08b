"""W3C trace context in call metadata."""

from collections.abc import Iterable

from opentelemetry.context import Context
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

Metadata = Iterable[tuple[str, str | bytes]]


def extract_context(metadata: Metadata) -> Context:
    """The caller's context; the empty one when it sent none or a malformed one."""
    carrier = {key: value for key, value in metadata if isinstance(value, str)}
    return TraceContextTextMapPropagator().extract(carrier, context=Context())


def inject_context(context: Context) -> list[tuple[str, str]]:
    """Metadata that carries ``context`` on, its sampled flag as it is."""
    carrier: dict[str, str] = {}
    TraceContextTextMapPropagator().inject(carrier, context=context)
    return list(carrier.items())
