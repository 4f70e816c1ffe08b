"""A fleet together with the receiver of its traces, for the commands that start one."""

import contextlib
import os
import signal
import socket
from collections.abc import Iterator
from typing import NoReturn

from epd.config import ConfigError
from epd.fleet.fleet import Fleet
from epd.fleet.plan import FleetPlan
from epd.fleet.state import StateFolder
from epd.telemetry.otlp_receiver import OtlpReceiver
from epd.telemetry.span_store import SpanSink

OTLP_VARIABLE = "OTEL_EXPORTER_OTLP_ENDPOINT"


@contextlib.contextmanager
def running_fleet(plan: FleetPlan, state: StateFolder, sink: SpanSink) -> Iterator[Fleet]:
    """Starts the plan, notes the router's address, stops everything on leaving.

    Spans go to ``sink`` unless the user has an OTLP endpoint of their own configured.

    Raises:
        ConfigError: a port of the router is taken.
        FleetError: a process ended or did not get ready.
    """
    check_port(plan.router_port, "--port")
    check_port(max(plan.http_port, 0), "--http-port")
    with contextlib.ExitStack() as stack:
        endpoint = ""
        if not os.environ.get(OTLP_VARIABLE):
            endpoint = stack.enter_context(OtlpReceiver(sink)).endpoint
        fleet = Fleet(plan, state.logs, otlp_endpoint=endpoint)
        fleet.start()
        try:
            state.remember_router(fleet.router_address)
            yield fleet
        finally:
            state.forget_router()
            try:
                fleet.stop()
            except BaseException:  # a second Ctrl-C
                fleet.kill()
                raise


@contextlib.contextmanager
def sigterm_interrupts() -> Iterator[None]:
    """SIGTERM raises KeyboardInterrupt, as Ctrl-C does, so that both run every ``finally``."""

    def interrupt(*_: object) -> NoReturn:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def check_port(port: int, flag: str) -> None:
    """Finds a taken port before models are loaded; 0 is never taken.

    Raises:
        ConfigError: something listens there.
    """
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            raise ConfigError(f"port {port} is taken; choose another with {flag}") from None
