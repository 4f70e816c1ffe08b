"""``python -m epd.rpc.health_probe --address HOST:PORT``: exit status 0 when the service serves."""

import os
import sys
from dataclasses import dataclass, field

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from epd.config import option, resolve_or_exit
from epd.rpc.credentials import channel_credentials
from epd.rpc.tls_config import ClientTlsConfig
from epd.rpc.tls_files import TlsFiles


@dataclass(frozen=True)
class ProbeConfig:
    """One health check, with a deadline."""

    address: str = option(help="host:port of the service")
    service: str = option("", help="full name of the service, empty asks for the whole process")
    timeout_s: float = option(2.0, help="deadline", unit="s", minimum=0.01)
    tls: ClientTlsConfig = field(default_factory=ClientTlsConfig)


def probe(config: ProbeConfig) -> str:
    """The health status, or the code of the failed call. Blocks."""
    with _channel(config) as channel:
        try:
            answer = health_pb2_grpc.HealthStub(channel).Check(
                health_pb2.HealthCheckRequest(service=config.service), timeout=config.timeout_s
            )
        except grpc.RpcError as error:
            return str(error.code().name)
    return str(health_pb2.HealthCheckResponse.ServingStatus.Name(answer.status))


def _channel(config: ProbeConfig) -> grpc.Channel:
    if not config.tls.on:
        return grpc.insecure_channel(config.address)
    name = config.tls.tls_server_name
    return grpc.secure_channel(
        config.address,
        channel_credentials(TlsFiles(config.tls).current),
        options=[("grpc.ssl_target_name_override", name)] if name else [],
    )


def main() -> None:
    """Entry point."""
    status = probe(resolve_or_exit(ProbeConfig, sys.argv[1:], os.environ, "health_probe"))
    print(status)
    raise SystemExit(0 if status == "SERVING" else 1)


if __name__ == "__main__":
    main()
