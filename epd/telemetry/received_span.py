"""A finished span as a receiver got it."""

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.common.v1.common_pb2 import AnyValue, KeyValue
from opentelemetry.proto.trace.v1 import trace_pb2

from epd.telemetry import semconv


@dataclass(frozen=True)
class ReceivedSpan:
    """Ids are hexadecimal, ``parent_id`` is empty on a root, times are ns since the epoch."""

    trace_id: str
    span_id: str
    parent_id: str
    name: str
    kind: str
    service: str
    instance: str
    start_ns: int
    end_ns: int
    failed: bool
    attributes: Mapping[str, Any] = field(default_factory=dict)
    events: tuple[str, ...] = ()

    @property
    def duration_ns(self) -> int:
        """From start to end."""
        return self.end_ns - self.start_ns

    def to_json(self) -> str:
        """One line."""
        return json.dumps(asdict(self), separators=(",", ":"))

    @classmethod
    def from_json(cls, line: str) -> "ReceivedSpan":
        """The reverse of :meth:`to_json`."""
        values = json.loads(line)
        return cls(**{**values, "events": tuple(values["events"])})


def spans_of_export(request: ExportTraceServiceRequest) -> Iterator[ReceivedSpan]:
    """The spans of one OTLP export."""
    for resource_spans in request.resource_spans:
        resource = _attributes(resource_spans.resource.attributes)
        for scope_spans in resource_spans.scope_spans:
            for span in scope_spans.spans:
                yield ReceivedSpan(
                    trace_id=span.trace_id.hex(),
                    span_id=span.span_id.hex(),
                    parent_id=span.parent_span_id.hex(),
                    name=span.name,
                    kind=trace_pb2.Span.SpanKind.Name(span.kind).removeprefix("SPAN_KIND_"),
                    service=str(resource.get(semconv.SERVICE_NAME, "")),
                    instance=str(resource.get(semconv.SERVICE_INSTANCE_ID, "")),
                    start_ns=span.start_time_unix_nano,
                    end_ns=span.end_time_unix_nano,
                    failed=span.status.code == trace_pb2.Status.STATUS_CODE_ERROR,
                    attributes=_attributes(span.attributes),
                    events=tuple(event.name for event in span.events),
                )


def _attributes(pairs: Iterable[KeyValue]) -> dict[str, Any]:
    return {pair.key: _value(pair.value) for pair in pairs}


def _value(value: AnyValue) -> Any:
    kind = value.WhichOneof("value")
    if kind == "array_value":
        return [_value(item) for item in value.array_value.values]
    return getattr(value, kind) if kind else None
