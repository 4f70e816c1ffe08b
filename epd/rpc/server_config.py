"""Settings that every gRPC service has."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from epd.config import option
from epd.rpc.tls_config import ServerTlsConfig


@dataclass(frozen=True)
class ServerConfig:
    """Where a service listens, how it stops and what it reports."""

    host: str = option("127.0.0.1", help="address to listen on")
    port: int = option(0, help="gRPC port, 0 picks a free one", minimum=0, maximum=65535)
    advertise_host: str = option(
        "",
        help="host that peers reach this service by; empty takes --host, and behind a wildcard "
        "address the address of this machine's own name",
    )
    metrics_host: str = option("127.0.0.1", help="address of the Prometheus endpoint")
    metrics_port: int = option(
        0,
        help="port of the Prometheus endpoint, 0 picks a free one, -1 is off",
        minimum=-1,
        maximum=65535,
    )
    insecure: bool = option(False, help="allow plain text on an address that is not loopback")
    reflection: bool = option(True, help="serve gRPC reflection")
    drain_notice_s: float = option(
        0.5,
        help="wait between NOT_SERVING and refusing calls, so that routers notice",
        unit="s",
        minimum=0,
    )
    drain_grace_s: float = option(
        30.0, help="how long running calls may go on after a stop", unit="s", minimum=0
    )
    heartbeat_s: float = option(
        0.25,
        help="period of load reports; less than the routers' --worker-silence-s",
        unit="s",
        minimum=0.01,
        maximum=60,
    )
    follow_stdin: bool = option(
        False, help="stop when standard input ends: a supervisor that dies takes its services along"
    )
    log_level: Literal["DEBUG", "INFO", "WARNING", "ERROR"] = option(
        "INFO", help="least severity logged"
    )
    tls: ServerTlsConfig = field(default_factory=ServerTlsConfig)

    @property
    def client_ca(self) -> Path | None:
        """CA of whoever calls this service; None asks callers for no certificate."""
        return self.tls.tls_ca
