"""The Prometheus endpoint of a service, and reading one."""

import logging
import ssl
import urllib.request
from collections.abc import Mapping
from dataclasses import dataclass

from prometheus_client import CollectorRegistry, generate_latest, start_http_server
from prometheus_client.parser import text_string_to_metric_families

from epd.config import ConfigError

_log = logging.getLogger(__name__)


class MetricsEndpoint:
    """Serves a registry's text on a thread of its own; over HTTPS where there is ``tls``.

    Raises:
        ConfigError: the address cannot be bound.
    """

    def __init__(
        self, registry: CollectorRegistry, host: str, port: int, tls: ssl.SSLContext | None = None
    ) -> None:
        try:
            self._server, self._thread = start_http_server(port, host, registry)
        except OSError as error:
            raise ConfigError(f"cannot serve metrics on {host}:{port}: {error.strerror}") from error
        if tls is not None:
            # Handshakes are left to the thread of their connection: in accept() a client that says
            # nothing would hold up all others.
            self._server.socket = tls.wrap_socket(
                self._server.socket, server_side=True, do_handshake_on_connect=False
            )
            self._server.handle_error = _note_failure  # type: ignore[method-assign]
        self._host = host
        self._registry = registry

    def text(self) -> bytes:
        """What the endpoint serves now. Runs the callbacks: not for an event loop."""
        return generate_latest(self._registry)

    @property
    def address(self) -> str:
        """host:port with the real port."""
        return f"{self._host}:{self._server.server_port}"

    def close(self) -> None:
        """Stops the thread and frees the port."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


@dataclass(frozen=True)
class Scrape:
    """One reading of an endpoint; names are as in the text, ``_total`` and ``_count`` included."""

    text: str
    samples: tuple[tuple[str, Mapping[str, str], float], ...]

    def total(self, name: str, **labels: str) -> float:
        """Sum over all samples of a name that carry these labels; 0 where there is none."""
        return sum(
            value
            for sample, found, value in self.samples
            if sample == name and all(found.get(key) == text for key, text in labels.items())
        )


def parse(text: str) -> Scrape:
    """Reads Prometheus text."""
    samples = tuple(
        (sample.name, sample.labels, sample.value)
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    )
    return Scrape(text=text, samples=samples)


def _note_failure(request: object, client_address: object) -> None:
    """Instead of a traceback on standard error for each client that does not speak TLS."""
    _log.debug("a scrape from %s failed", client_address, exc_info=True)


def scrape(address: str, timeout_s: float = 5.0, tls: ssl.SSLContext | None = None) -> Scrape:
    """Reads the endpoint at ``host:port``, over HTTPS with ``tls``; blocks.

    Raises:
        OSError: nobody answers in time.
    """
    url = f"{'https' if tls else 'http'}://{address}/metrics"
    with urllib.request.urlopen(url, timeout=timeout_s, context=tls) as response:
        return parse(response.read().decode())
