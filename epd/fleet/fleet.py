"""A fleet of service processes on this machine."""

import os
import signal
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from epd.fleet.plan import FleetPlan
from epd.fleet.process import FleetError, ServiceProcess

READY_TIMEOUT_S = 120.0
#: Above the drain of the services: notice and grace.
STOP_TIMEOUT_S = 15.0
#: Short drains: the fleet belongs to one person who wants it gone. No service outlives the fleet's
#: own process.
COMMON_FLAGS = ("--follow-stdin", "--drain-notice-s=0.1", "--drain-grace-s=5")
_TLS = "EPD_TLS_"


class Fleet:
    """Starts and stops the processes of a plan; each address is known from a READY line.

    Decode workers come before prefill workers, which pair with them, and the router comes last,
    because ports are only known once a process is ready.

    Args:
        plan: What to start.
        log_folder: Where the processes' output goes.
        otlp_endpoint: Where they send spans; empty for nowhere.
        ready_timeout_s: How long a process may take to get ready.
    """

    def __init__(
        self,
        plan: FleetPlan,
        log_folder: Path,
        *,
        otlp_endpoint: str = "",
        ready_timeout_s: float = READY_TIMEOUT_S,
    ) -> None:
        self.plan = plan
        self._log_folder = log_folder
        self._environment = _environment(plan.environment, otlp_endpoint)
        self._ready_timeout_s = ready_timeout_s
        #: By name: encoder-0, prefill-0, decode-0, unified-0, router.
        self.processes: dict[str, ServiceProcess] = {}

    @property
    def router_address(self) -> str:
        """host:port of the front door."""
        return self.processes["router"].address

    @property
    def http_address(self) -> str:
        """host:port of the router's HTTP face; empty when it is off."""
        return self.processes["router"].http_address

    def of_role(self, role: str) -> list[ServiceProcess]:
        """The processes of a role, unified workers among the decode workers."""
        return [process for process in self.processes.values() if process.role == role]

    def start(self) -> None:
        """Starts everything; on failure nothing is left running.

        Raises:
            FleetError: a process ended or did not get ready in time; the text says which and why.
        """
        plan = self.plan
        try:
            first = [self._spawn("encoder", f"encoder-{i}") for i in range(plan.encoders)]
            first += [self._spawn("decode", f"decode-{i}") for i in range(plan.decodes)]
            first += [
                self._spawn("decode", f"unified-{i}", "--unified") for i in range(plan.unified)
            ]
            self._await(first)
            paired = [p.address for p in first if p.name.startswith("decode-")]
            self._await(
                [
                    self._spawn("prefill", f"prefill-{i}", "--decodes", ",".join(paired))
                    for i in range(plan.prefills)
                ]
            )
            ports = (f"--port={plan.router_port}", f"--http-port={plan.http_port}")
            self.add_router("router", *ports)
        except BaseException:
            self.kill()
            raise

    def add_router(self, name: str, *flags: str) -> ServiceProcess:
        """Starts a router before the workers that there are, beside those that run already.

        Raises:
            FleetError: it ended or did not get ready in time.
        """
        lists = [
            f"--{role}s={','.join(process.address for process in self.of_role(role))}"
            for role in ("encoder", "prefill", "decode")
        ]
        process = self._spawn("router", name, *flags, *lists)
        self._await([process])
        return process

    def check(self) -> None:
        """Raises FleetError naming a process that has ended."""
        for process in self.processes.values():
            if not process.running:
                raise FleetError(
                    f"{process.name} ended with status {process.exit_status}: {process.last_line()}"
                )

    def stop(self, timeout_s: float = STOP_TIMEOUT_S) -> None:
        """Stops routers, then the workers, and kills what is left after ``timeout_s``."""
        deadline = time.monotonic() + timeout_s
        routers = self.of_role("router")
        workers = [process for process in self.processes.values() if process.role != "router"]
        for stage in (routers, workers):
            for process in stage:
                process.send_signal(signal.SIGTERM)
            for process in stage:
                process.wait(max(0.0, deadline - time.monotonic()))
        self.kill()

    def kill(self) -> None:
        """Ends everything at once."""
        for process in self.processes.values():
            process.kill()

    def _spawn(self, role: str, name: str, *flags: str) -> ServiceProcess:
        process = ServiceProcess(
            role,
            name,
            [
                *(sys.executable, "-m", f"services.{role}", f"--model={self.plan.model}"),
                *COMMON_FLAGS,
                *flags,
                *self.plan.flags_of(role, name),
            ],
            self._environment,
            self._log_folder,
        )
        self.processes[name] = process
        process.start()
        return process

    def _await(self, processes: Sequence[ServiceProcess]) -> None:
        deadline = time.monotonic() + self._ready_timeout_s
        for process in processes:
            process.wait_ready(max(0.1, deadline - time.monotonic()))


def _environment(extra: Mapping[str, str], otlp_endpoint: str) -> dict[str, str]:
    # A client's certificates in the user's environment are for other fleets: this one is plain text
    # on loopback, unless its plan says otherwise.
    inherited = {name: text for name, text in os.environ.items() if not name.startswith(_TLS)}
    # Quick batches, so that a trace can be looked at right after its request.
    otlp = {"OTEL_EXPORTER_OTLP_ENDPOINT": otlp_endpoint, "OTEL_BSP_SCHEDULE_DELAY": "200"}
    return {
        "GRPC_VERBOSITY": "ERROR",
        "PYTHONUNBUFFERED": "1",
        **inherited,
        **(otlp if otlp_endpoint else {}),
        **extra,
    }
