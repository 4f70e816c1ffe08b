"""A server with this project's interceptors and a traced channel to it, in one process."""

import contextlib
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass

import grpc
import pytest

from epd.rpc.channels import open_channel
from epd.rpc.server import GrpcServer
from epd.rpc.server_config import ServerConfig
from epd.rpc.server_interceptors import server_interceptors
from epd.telemetry.otlp_receiver import OtlpReceiver
from epd.telemetry.setup import METRICS_OFF, Telemetry, start_telemetry
from epd.telemetry.span_store import SpanStore


@dataclass
class RpcPair:
    """Both ends. ``flush`` makes every finished span appear in ``spans``."""

    server: GrpcServer
    channel: grpc.aio.Channel
    server_telemetry: Telemetry
    client_telemetry: Telemetry
    spans: SpanStore

    def flush(self) -> None:
        """Exports what both ends have finished."""
        self.client_telemetry.tracer_provider.force_flush()
        self.server_telemetry.tracer_provider.force_flush()


@contextlib.asynccontextmanager
async def rpc_pair(
    monkeypatch: pytest.MonkeyPatch,
    services: Sequence[tuple[str, Callable[[object], None]]],
    *,
    starts_traces: bool = False,
    metrics_port: int = METRICS_OFF,
    config: ServerConfig | None = None,
) -> AsyncIterator[RpcPair]:
    """Serves ``services``: full name and a function that adds the servicer to ``handlers``."""
    spans = SpanStore()
    with OtlpReceiver(spans) as receiver:
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", receiver.endpoint)
        ends = [
            start_telemetry(role, role + "-1", metrics_port=metrics_port)
            for role in ("decode", "prefill")
        ]
        server = GrpcServer(
            config or ServerConfig(drain_notice_s=0, drain_grace_s=0.2),
            [name for name, _ in services],
            server_interceptors(ends[0], starts_traces=starts_traces),
        )
        await server.start()
        for _, add in services:
            add(server.handlers)
        await server.set_serving()
        channel = open_channel(server.address, ends[1])
        try:
            yield RpcPair(server, channel, ends[0], ends[1], spans)
        finally:
            await channel.close(0)
            await server.stop()
            for telemetry in ends:
                telemetry.close()
