"""An OTLP gRPC receiver that keeps spans: shows traces without any extra server."""

from concurrent import futures
from types import TracebackType

import grpc
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2, trace_service_pb2_grpc

from epd.config import ConfigError
from epd.telemetry.received_span import spans_of_export
from epd.telemetry.span_store import SpanSink

MAX_EXPORT_BYTES = 16 * 1024 * 1024


class OtlpReceiver:
    """Serves TraceService/Export on threads of its own, so that it fits into any program.

    Args:
        sink: Where spans go.
        host: Address to listen on.
        port: 0 picks a free one.

    Raises:
        ConfigError: the address cannot be bound.
    """

    def __init__(self, sink: SpanSink, host: str = "127.0.0.1", port: int = 0) -> None:
        self._server = grpc.server(
            futures.ThreadPoolExecutor(max_workers=2, thread_name_prefix="otlp"),
            options=[
                ("grpc.max_receive_message_length", MAX_EXPORT_BYTES),
                ("grpc.so_reuseport", 0),
            ],
        )
        trace_service_pb2_grpc.add_TraceServiceServicer_to_server(_Servicer(sink), self._server)
        try:
            self._port = self._server.add_insecure_port(f"{host}:{port}")
        except RuntimeError as error:
            raise ConfigError(f"cannot receive traces on {host}:{port}: taken?") from error
        self._host = host
        self._server.start()

    @property
    def endpoint(self) -> str:
        """Value for OTEL_EXPORTER_OTLP_ENDPOINT."""
        return f"http://{self._host}:{self._port}"

    def close(self) -> None:
        """Takes what is being sent, then frees the port."""
        self._server.stop(grace=1.0).wait()

    def __enter__(self) -> "OtlpReceiver":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()


class _Servicer(trace_service_pb2_grpc.TraceServiceServicer):
    def __init__(self, sink: SpanSink) -> None:
        self._sink = sink

    def Export(
        self,
        request: trace_service_pb2.ExportTraceServiceRequest,
        context: grpc.ServicerContext,
    ) -> trace_service_pb2.ExportTraceServiceResponse:
        self._sink.add(spans_of_export(request))
        return trace_service_pb2.ExportTraceServiceResponse()
