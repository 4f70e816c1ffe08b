"""Settings of TLS: a server's, and a client's."""

from dataclasses import dataclass
from pathlib import Path

from epd.config import option


@dataclass(frozen=True)
class TlsConfig:
    """The PEM files of one end."""

    tls_certificate: Path | None = option(
        None, help="certificate chain, PEM; a service's names its role, as in decode.epd.internal"
    )
    tls_key: Path | None = option(None, help="private key of that certificate, PEM, not encrypted")
    tls_ca: Path | None = option(
        None, help="CA certificates that peers' certificates must come from, PEM"
    )
    tls_reload_s: float = option(
        5.0, help="how often these files are read again", unit="s", minimum=0.05
    )

    def __post_init__(self) -> None:
        if (self.tls_certificate is None) != (self.tls_key is None):
            raise ValueError("--tls-certificate and --tls-key go together")


@dataclass(frozen=True)
class ServerTlsConfig(TlsConfig):
    """Of a service. All files or none: services show each other their certificates."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if (self.tls_certificate is None) != (self.tls_ca is None):
            raise ValueError("--tls-certificate, --tls-key and --tls-ca go together")

    @property
    def on(self) -> bool:
        """Whether anything is encrypted."""
        return self.tls_certificate is not None


@dataclass(frozen=True)
class ClientTlsConfig(TlsConfig):
    """Of a client: the CA, and a certificate where the server asks for one."""

    tls: bool = option(False, help="use TLS, with the system's CAs where there is no --tls-ca")
    tls_server_name: str = option(
        "", help="name that the server's certificate must have; empty takes the host"
    )
    insecure: bool = option(False, help="allow plain text to an address that is not loopback")

    @property
    def on(self) -> bool:
        """Whether the connection is encrypted."""
        return self.tls or self.tls_ca is not None or self.tls_certificate is not None
