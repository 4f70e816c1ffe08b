"""Options of the commands that call a router: one definition for flag and variable."""

from pathlib import Path
from typing import Annotated, Any

import typer

from epd.config import ConfigError, describe
from epd.rpc.tls_config import ClientTlsConfig

_SETTINGS = {found.name: found for found in describe(ClientTlsConfig)}


def _option(name: str) -> Any:
    found = _SETTINGS[name]
    help = f"{found.help[0].upper()}{found.help[1:]}."
    return typer.Option(found.flag, envvar=found.variable, show_envvar=True, help=help)


Tls = Annotated[bool, _option("tls")]
TlsCa = Annotated[Path | None, _option("tls_ca")]
TlsCertificate = Annotated[Path | None, _option("tls_certificate")]
TlsKey = Annotated[Path | None, _option("tls_key")]
TlsServerName = Annotated[str, _option("tls_server_name")]
Insecure = Annotated[bool, _option("insecure")]
ApiKey = Annotated[
    str,
    typer.Option(
        envvar="EPD_API_KEY", help="API key; better as a variable, since flags are visible to all."
    ),
]


def client_tls(
    tls: bool,
    tls_ca: Path | None,
    tls_certificate: Path | None,
    tls_key: Path | None,
    tls_server_name: str,
    insecure: bool,
) -> ClientTlsConfig:
    """The settings that these options make.

    Raises:
        ConfigError: a certificate without its key, or the reverse.
    """
    try:
        return ClientTlsConfig(
            tls_certificate=tls_certificate,
            tls_key=tls_key,
            tls_ca=tls_ca,
            tls=tls,
            tls_server_name=tls_server_name,
            insecure=insecure,
        )
    except ValueError as error:
        raise ConfigError(str(error)) from error
