"""Certificates and keys as they are on disk now."""

import asyncio
import logging
import ssl
import typing
from dataclasses import dataclass, field
from pathlib import Path

from epd.config import ConfigError
from epd.rpc.tls_config import TlsConfig

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class TlsMaterial:
    """What the files held at one moment, PEM; None where there is no file."""

    certificate: bytes | None
    key: bytes | None = field(repr=False)
    ca: bytes | None
    #: CA of callers; without it they are asked for no certificate.
    client_ca: bytes | None


class TlsFiles:
    """The one place that reads the files, again and again.

    Whoever needs them asks for :attr:`current` at each new connection. Files that do not fit
    together, as in the middle of being replaced, change nothing: what was read before still holds.

    Args:
        config: Which files, and how often.
        client_ca: Of callers; None asks them for no certificate.

    Raises:
        ConfigError: a file cannot be read, or they do not fit together.
    """

    def __init__(self, config: TlsConfig, client_ca: Path | None = None) -> None:
        self._config = config
        self._client_ca = client_ca
        self._trouble = ""
        self._current, self._context = self._read()

    @property
    def current(self) -> TlsMaterial:
        """The latest that fits together; another object after each change."""
        return self._current

    def server_context(self) -> ssl.SSLContext:
        """For servers that keep one context: each handshake uses the files of its own moment."""
        context = self._read()[1]
        # Called in every handshake, also when the client names no host.
        context.sni_callback = self._take_latest
        return context

    def refresh(self) -> None:
        """Reads the files again. Blocks."""
        try:
            material, context = self._read()
        except ConfigError as error:
            if str(error) != self._trouble:
                _log.error("certificates stay as they were: %s", error)
            self._trouble = str(error)
            return
        self._trouble = ""
        if material != self._current:
            self._context = context
            self._current = material
            _log.info("certificates read again: they have changed")

    async def watch(self) -> None:
        """Keeps :attr:`current` up to date until cancelled."""
        while True:
            await asyncio.sleep(self._config.tls_reload_s)
            await asyncio.to_thread(self.refresh)

    def _take_latest(
        self, connection: ssl.SSLObject, name: str | None, context: ssl.SSLContext
    ) -> None:
        connection.context = self._context

    def _read(self) -> tuple[TlsMaterial, ssl.SSLContext]:
        material = self._bytes()
        context = self._fitting()
        # The context comes from the paths: had they changed since, it could be of other files.
        if self._bytes() != material:
            raise ConfigError("the certificate files are being replaced")
        return material, context

    def _bytes(self) -> TlsMaterial:
        config = self._config
        return TlsMaterial(
            certificate=_content(config.tls_certificate),
            key=_content(config.tls_key),
            ca=_content(config.tls_ca),
            client_ca=_content(self._client_ca),
        )

    def _fitting(self) -> ssl.SSLContext:
        """A server's context of the files; making it is also the check that they fit."""
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        config = self._config
        if config.tls_certificate and config.tls_key:
            try:
                context.load_cert_chain(config.tls_certificate, config.tls_key, _no_password)
            except (OSError, ValueError) as error:  # ssl.SSLError is an OSError
                files = f"{config.tls_certificate} and {config.tls_key}"
                raise ConfigError(f"{files} are no certificate and its key: {error}") from error
        for file in (config.tls_ca, self._client_ca):
            if file is not None:
                _check_ca(file)
        if self._client_ca is not None:
            context.load_verify_locations(self._client_ca)
            context.verify_mode = ssl.CERT_REQUIRED
        return context


def _content(path: Path | None) -> bytes | None:
    if path is None:
        return None
    try:
        return path.read_bytes()
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}") from error


def _check_ca(file: Path) -> None:
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT).load_verify_locations(file)
    except (OSError, ValueError) as error:
        raise ConfigError(f"{file} holds no CA certificates: {error}") from error


def _no_password() -> typing.NoReturn:
    """Instead of a question on the terminal of whoever started the service."""
    raise ValueError("the key is encrypted")
