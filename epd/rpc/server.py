"""A gRPC server with health, reflection and an orderly end."""

import asyncio
import logging
import socket
from collections.abc import Callable, Sequence

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from epd.errors import UnavailableError
from epd.rpc.aliases import ServerInterceptor
from epd.rpc.credentials import add_port, join_address
from epd.rpc.handlers import LateHandlers
from epd.rpc.options import MESSAGE_BYTES, server_options
from epd.rpc.running_calls import RunningCalls
from epd.rpc.server_config import ServerConfig
from epd.rpc.tls_files import TlsFiles

_log = logging.getLogger(__name__)
#: How often a drain looks whether it is over.
_IDLE_POLL_S = 0.02
#: How long calls may take to end once they have been told to.
_END_S = 2.0
_WILDCARDS = frozenset({"0.0.0.0", "::", ""})


class GrpcServer:
    """Answers health checks from :meth:`start` on, and calls of its services once they are added.

    Args:
        config: Where to listen and how to stop.
        service_names: Full names, such as ``epd.v1.PrefillService``.
        interceptors: Outermost first.
        message_bytes: Largest message accepted or sent.
        tls: Certificates; None is plain text.
    """

    def __init__(
        self,
        config: ServerConfig,
        service_names: Sequence[str],
        interceptors: Sequence[ServerInterceptor] = (),
        message_bytes: int = MESSAGE_BYTES,
        tls: TlsFiles | None = None,
    ) -> None:
        self._config = config
        self._tls = tls
        self._service_names = tuple(service_names)
        self._health = health.aio.HealthServicer()  # type: ignore[attr-defined]
        self._draining = asyncio.Event()
        self._failure = ""
        self._port = 0
        #: Stands in for the server in generated ``add_…Servicer_to_server`` functions.
        self.handlers = LateHandlers(self._service_names)
        self._calls = RunningCalls()
        self._needed: list[Callable[[], bool]] = []
        self._server = grpc.aio.server(
            handlers=[self.handlers],
            interceptors=[*interceptors, self._calls],
            options=server_options(message_bytes),
        )

    @property
    def address(self) -> str:
        """host:port under which peers reach this server; valid after :meth:`start`."""
        host = self._config.advertise_host or self._config.host
        if host in _WILDCARDS:
            host = socket.gethostbyname(socket.gethostname())
        return join_address(host, self._port)

    @property
    def draining(self) -> bool:
        """True once the end has begun: no new work."""
        return self._draining.is_set()

    async def wait_draining(self) -> None:
        """Waits for the beginning of the end."""
        await self._draining.wait()

    @property
    def failure(self) -> str:
        """Why the service can never serve again; empty while it can."""
        return self._failure

    async def start(self) -> None:
        """Binds and answers health checks with NOT_SERVING.

        Raises:
            ConfigError: the address cannot be bound or must not carry plain text.
        """
        await self._set_health(health_pb2.HealthCheckResponse.NOT_SERVING)
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self._server)
        if self._config.reflection:
            names = (*self._service_names, health.SERVICE_NAME, reflection.SERVICE_NAME)
            reflection.enable_server_reflection(names, self._server)
        config = self._config
        self._port = add_port(
            self._server, config.host, config.port, insecure=config.insecure, tls=self._tls
        )
        await self._server.start()

    async def set_serving(self) -> None:
        """Tells health checks that requests are welcome, unless the service failed before."""
        if not self._failure:
            await self._set_health(health_pb2.HealthCheckResponse.SERVING)

    async def fail(self, reason: str) -> None:
        """Tells health checks that this process cannot serve any more; the first reason is kept."""
        if not self._failure:
            self._failure = reason
            _log.error("not serving any more: %s", reason)
            await self._set_health(health_pb2.HealthCheckResponse.NOT_SERVING)

    def stay_while(self, needed: Callable[[], bool]) -> None:
        """Makes a drain last while somebody needs this process who is in no call just now."""
        self._needed.append(needed)

    async def stop(self) -> None:
        """Drains: NOT_SERVING, a wait so that routers notice, then what runs gets its grace.

        New requests are refused, the short calls that running ones need are answered, and the end
        comes as soon as nothing runs. Calls that are left at the end of the grace period end with
        UNAVAILABLE and a retry hint, as watches do in any case.
        """
        self._draining.set()
        await self._health.enter_graceful_shutdown()
        await asyncio.sleep(self._config.drain_notice_s)
        self._calls.refuse_work(UnavailableError("draining", reason="DRAINING"))
        try:
            async with asyncio.timeout(self._config.drain_grace_s):
                # Leases run out by themselves, so nobody could set an event.
                while self._busy():  # noqa: ASYNC110
                    await asyncio.sleep(_IDLE_POLL_S)
        except TimeoutError:
            _log.warning("the grace period of %g s is over", self._config.drain_grace_s)
        self._calls.end(UnavailableError("shutting down", reason="SHUTTING_DOWN"))
        await self._server.stop(_END_S)

    def _busy(self) -> bool:
        return self._calls.working or any(needed() for needed in self._needed)

    async def close(self) -> None:
        """Ends at once what :meth:`stop` has not ended, for instance after a failed start."""
        await self._server.stop(0)

    async def _set_health(self, status: int) -> None:
        for name in ("", *self._service_names):
            await self._health.set(name, status)
