"""The life of a service process, from its flags to its exit status."""

import asyncio
import logging
import os
import signal
import sys
from collections.abc import Callable, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from typing import Generic, TextIO, TypeVar

from epd.cleanup import cancel_and_wait
from epd.config import ConfigError, resolve_or_exit, settings, unused_variables
from epd.errors import EpdError
from epd.rpc.access import WORKERS, AccessInterceptor
from epd.rpc.credentials import ChannelTls, refuse_plain_text
from epd.rpc.logs import configure_logging
from epd.rpc.options import MESSAGE_BYTES
from epd.rpc.request_context import new_id
from epd.rpc.roles import role_name
from epd.rpc.server import GrpcServer
from epd.rpc.server_config import ServerConfig
from epd.rpc.server_interceptors import server_interceptors
from epd.rpc.status import root_error
from epd.rpc.tls_files import TlsFiles
from epd.telemetry.metrics import observe
from epd.telemetry.semconv import EVENT_LOOP_TASKS
from epd.telemetry.setup import METRICS_OFF, Telemetry, start_telemetry
from epd.thread_slices import serve_promptly

_log = logging.getLogger(__name__)
C = TypeVar("C", bound=ServerConfig)


@dataclass(frozen=True)
class ServiceContext:
    """What a service is built with. ``instance_id`` is new at every process start.

    An application that listens elsewhere too puts the address into ``addresses`` under a name;
    they follow in the READY line.
    """

    role: str
    instance_id: str
    server: GrpcServer
    telemetry: Telemetry
    addresses: dict[str, str] = field(default_factory=dict)
    #: This process's certificates; None is plain text.
    tls: TlsFiles | None = None

    def peer_tls(self, role: str) -> ChannelTls | None:
        """How workers of a role are reached: their certificates must name it."""
        return ChannelTls(self.tls, role_name(role)) if self.tls else None


#: Loads and starts the service on entry (adds its servicers to ``server.handlers``), stops it on
#: exit: engine loop, then registered memory, then channels. No call is running any more by then.
Application = Callable[[C, ServiceContext], AbstractAsyncContextManager[None]]


@dataclass(frozen=True)
class Service(Generic[C]):
    """A kind of service process.

    ``starts_traces`` is for the router only; ``message_bytes`` bounds a gRPC message.
    """

    role: str
    config_class: type[C]
    service_names: Sequence[str]
    application: Application[C]
    starts_traces: bool = False
    message_bytes: int = MESSAGE_BYTES

    def main(self) -> None:
        """Runs as ``python -m services.<role>``: status 0 after a stop by signal, 2 for a wrong
        setting, 1 when the service cannot start."""
        config = resolve_or_exit(
            self.config_class, sys.argv[1:], os.environ, f"services.{self.role}"
        )
        configure_logging(config.log_level)
        _log.info("settings: %s", settings(config))
        unused = unused_variables(self.config_class, os.environ)
        if unused:
            _log.info("variables that %s does not use: %s", self.role, ", ".join(unused))
        try:
            asyncio.run(self.run(config))
        except Exception as raised:
            error = root_error(raised)
            # A missing file of the model, for one; an OSError without a file may be a bug.
            named = isinstance(error, OSError) and error.filename is not None
            if not named and not isinstance(error, ConfigError | EpdError):
                raise
            print(f"{self.role}: {error}", file=sys.stderr)
            raise SystemExit(2 if isinstance(error, ConfigError) else 1) from None
        # All that matters is closed and flushed; taking torch's modules apart one by one would
        # hold the process, its memory and its port for seconds.
        logging.shutdown()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)

    async def run(self, config: C) -> None:
        """Serves until SIGTERM or SIGINT.

        Start: bind, NOT_SERVING, load, SERVING, READY line. Stop: NOT_SERVING, drain, application,
        telemetry. A signal while loading ends it as soon as the load can be interrupted.
        """
        serve_promptly()  # before any other thread starts
        stop = _StopSignal()
        if config.follow_stdin:
            await stop.follow(sys.stdin)
        instance_id = new_id()
        tls = TlsFiles(config.tls, config.client_ca) if config.tls.on else None
        telemetry = _telemetry(self.role, instance_id, config, tls)
        loop = asyncio.get_running_loop()
        observe(telemetry.meter, {EVENT_LOOP_TASKS: lambda: len(asyncio.all_tasks(loop))})
        interceptors = server_interceptors(telemetry, starts_traces=self.starts_traces)
        if tls and self.role in WORKERS:
            interceptors.append(AccessInterceptor())
        server = GrpcServer(config, self.service_names, interceptors, self.message_bytes, tls)
        context = ServiceContext(self.role, instance_id, server, telemetry, tls=tls)
        following = asyncio.create_task(_follow_certificates(tls, server))
        try:
            await server.start()
            async with self.application(config, context):
                stop.interrupts = False
                await server.set_serving()
                print(_ready_line(context), flush=True)
                await stop.event.wait()
                _log.info("draining")
                await server.stop()
        except asyncio.CancelledError:
            if not stop.event.is_set():
                raise
        finally:
            await server.close()
            await cancel_and_wait(following)
            await asyncio.to_thread(telemetry.close)


def _telemetry(
    role: str, instance_id: str, config: ServerConfig, tls: TlsFiles | None
) -> Telemetry:
    if tls is None and config.metrics_port != METRICS_OFF:
        refuse_plain_text(config.metrics_host, "the metrics endpoint", insecure=config.insecure)
    return start_telemetry(
        role,
        instance_id,
        metrics_host=config.metrics_host,
        metrics_port=config.metrics_port,
        tls=tls.server_context() if tls else None,
    )


async def _follow_certificates(tls: TlsFiles | None, server: GrpcServer) -> None:
    if tls is None:
        return
    try:
        await tls.watch()
    except Exception as error:
        # Its certificate would run out some day, unseen.
        await server.fail(f"the watch of certificates ended: {error!r}")
        raise


def _ready_line(context: ServiceContext) -> str:
    parts = {
        "role": context.role,
        "address": context.server.address,
        "metrics": context.telemetry.metrics_address,
        **context.addresses,
    }
    return " ".join(["READY", *(f"{name}={value}" for name, value in parts.items())])


class _StopSignal:
    """SIGTERM and SIGINT: cancel the main task while ``interrupts``, set ``event`` in any case."""

    def __init__(self) -> None:
        self.event = asyncio.Event()
        self.interrupts = True
        self._task = asyncio.current_task()
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._request)

    async def follow(self, stream: TextIO) -> None:
        """Takes the end of ``stream`` for a signal too."""
        request = self._request

        class Watcher(asyncio.Protocol):
            def connection_lost(self, error: Exception | None) -> None:
                request()

        await asyncio.get_running_loop().connect_read_pipe(Watcher, stream)

    def _request(self) -> None:
        if self.interrupts and not self.event.is_set() and self._task is not None:
            self._task.cancel()
        self.event.set()
