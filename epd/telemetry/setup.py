"""Tracer and meter of one service, configured by the standard OTEL_* variables."""

import os
import ssl
from dataclasses import dataclass
from importlib import metadata

from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
from opentelemetry.exporter.prometheus import PrometheusMetricReader
from opentelemetry.metrics import Meter
from opentelemetry.sdk.environment_variables import (
    OTEL_EXPORTER_OTLP_ENDPOINT,
    OTEL_EXPORTER_OTLP_TRACES_ENDPOINT,
)
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import MetricReader
from opentelemetry.sdk.resources import OTELResourceDetector, Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.trace import Tracer
from prometheus_client import CollectorRegistry

from epd.telemetry import semconv
from epd.telemetry.prometheus import MetricsEndpoint

METRICS_OFF = -1


@dataclass(frozen=True)
class Telemetry:
    """What a service traces and measures with. Nothing is registered globally."""

    tracer: Tracer
    meter: Meter
    tracer_provider: TracerProvider
    meter_provider: MeterProvider
    endpoint: MetricsEndpoint | None

    @property
    def metrics_address(self) -> str:
        """host:port of the Prometheus endpoint; empty when it is off."""
        return self.endpoint.address if self.endpoint else ""

    def close(self, flush_timeout_s: float = 2.0) -> None:
        """Sends the spans that are left, within the time given, and frees the port. Blocks."""
        self.tracer_provider.force_flush(int(flush_timeout_s * 1000))
        self.tracer_provider.shutdown()
        self.meter_provider.shutdown()
        if self.endpoint:
            self.endpoint.close()


def start_telemetry(
    role: str,
    instance_id: str,
    *,
    metrics_host: str = "127.0.0.1",
    metrics_port: int = METRICS_OFF,
    tls: ssl.SSLContext | None = None,
) -> Telemetry:
    """Sets up tracing and metrics of the service ``epd-{role}``; ``tls`` is for the metrics.

    Spans are exported only when an OTLP endpoint is configured; without one they still carry the
    trace context on. The sampled flag of the caller is respected (the SDK's default sampler).

    Raises:
        ConfigError: the metrics address cannot be bound.
    """
    resource = _resource(role, instance_id)
    tracer_provider = TracerProvider(resource=resource, shutdown_on_exit=False)
    if any(os.environ.get(name) for name in _ENDPOINT_VARIABLES):
        tracer_provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter()))
    readers: list[MetricReader] = []
    endpoint = None
    if metrics_port != METRICS_OFF:
        registry = CollectorRegistry()
        readers.append(PrometheusMetricReader(registry=registry, scope_info_enabled=False))
        endpoint = MetricsEndpoint(registry, metrics_host, metrics_port, tls)
    meter_provider = MeterProvider(readers, resource=resource, shutdown_on_exit=False)
    version = metadata_version()
    return Telemetry(
        tracer=tracer_provider.get_tracer(
            semconv.INSTRUMENTATION_SCOPE, version, schema_url=semconv.SCHEMA_URL
        ),
        meter=meter_provider.get_meter(
            semconv.INSTRUMENTATION_SCOPE, version, schema_url=semconv.SCHEMA_URL
        ),
        tracer_provider=tracer_provider,
        meter_provider=meter_provider,
        endpoint=endpoint,
    )


def metadata_version() -> str:
    """Version of the installed epd; ``0`` in a source tree that is not installed."""
    try:
        return metadata.version("epd")
    except metadata.PackageNotFoundError:
        return "0"


_ENDPOINT_VARIABLES = (OTEL_EXPORTER_OTLP_ENDPOINT, OTEL_EXPORTER_OTLP_TRACES_ENDPOINT)


def _resource(role: str, instance_id: str) -> Resource:
    ours = Resource(
        {
            semconv.SERVICE_NAME: f"epd-{role}",
            semconv.SERVICE_NAMESPACE: "epd",
            semconv.SERVICE_VERSION: metadata_version(),
            semconv.SERVICE_INSTANCE_ID: instance_id,
        }
    )
    # OTEL_SERVICE_NAME and OTEL_RESOURCE_ATTRIBUTES win over ours.
    return Resource.create().merge(ours).merge(OTELResourceDetector().detect())
