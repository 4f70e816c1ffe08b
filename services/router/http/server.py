"""The HTTP server beside the gRPC one, on the same event loop."""

import asyncio
import contextlib
import functools
import socket
import ssl
from collections.abc import Callable, Iterator

import uvicorn
from starlette.types import ASGIApp

from epd.config import ConfigError
from epd.rpc.credentials import join_address, refuse_plain_text
from epd.rpc.server import GrpcServer
from epd.rpc.server_config import ServerConfig
from epd.rpc.tls_files import TlsFiles
from services.router.config import HttpConfig
from services.router.http.bounded_protocol import BoundedProtocol

_BACKLOG = 1024


class HttpServer:
    """Serves an application until the gRPC server drains, then lets running requests finish.

    Args:
        app: What answers.
        server: Tells when the end begins.
        config: Address and drain times, shared with gRPC.
        http: Port and bounds.
        tls: Certificates; None is plain text.

    Raises:
        ConfigError: the address cannot be bound or must not carry plain text.
    """

    def __init__(
        self,
        app: ASGIApp,
        server: GrpcServer,
        config: ServerConfig,
        http: HttpConfig,
        tls: TlsFiles | None = None,
    ) -> None:
        self._server = server
        self._drain_notice_s = config.drain_notice_s
        if tls is None:
            refuse_plain_text(config.host, "HTTP", insecure=config.insecure)
        self._socket = _bind(config.host, http.http_port)
        host = config.advertise_host or config.host
        self.address = join_address(host, self._socket.getsockname()[1])
        self._uvicorn = _Embedded(
            uvicorn.Config(
                app,
                http=functools.partial(BoundedProtocol, http.http_head_timeout_s),  # type: ignore[arg-type]
                ws="none",
                loop="none",
                lifespan="off",
                log_config=None,
                log_level="warning",
                access_log=False,
                server_header=False,
                backlog=_BACKLOG,
                limit_concurrency=http.http_connections,
                timeout_keep_alive=round(http.http_keep_alive_s),
                timeout_graceful_shutdown=max(1, round(config.drain_grace_s)),
                ssl_context_factory=_context_factory(tls) if tls else None,
            )
        )

    async def run(self) -> None:
        """Serves. Ends when everything is drained."""
        async with asyncio.TaskGroup() as group:
            ending = group.create_task(self._await_end())
            await self._uvicorn.serve(sockets=[self._socket])
            ending.cancel()

    def close(self) -> None:
        """Begins the end now, if it has not begun."""
        self._uvicorn.should_exit = True

    async def _await_end(self) -> None:
        await self._server.wait_draining()
        await asyncio.sleep(self._drain_notice_s)
        self._uvicorn.should_exit = True


class _Embedded(uvicorn.Server):
    """Leaves the process's signals alone: they are the service's."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Captures none."""
        yield


def _context_factory(tls: TlsFiles) -> Callable[..., ssl.SSLContext]:
    return lambda config, default: tls.server_context()


def _bind(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, port), family=family, backlog=_BACKLOG)
    except OSError as error:
        raise ConfigError(
            f"cannot listen on {join_address(host, port)}: {error.strerror}"
        ) from error
