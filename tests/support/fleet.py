"""Real fleets for tests: processes, traces, metrics, faults, and whether all memory is back."""

import contextlib
import os
import signal
import socket
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil

from epd.fleet.fleet import Fleet
from epd.fleet.plan import ROLES, FleetPlan
from epd.fleet.process import ServiceProcess
from epd.telemetry import semconv
from epd.telemetry.otlp_receiver import OtlpReceiver
from epd.telemetry.prometheus import Scrape, scrape
from epd.telemetry.received_span import ReceivedSpan
from epd.telemetry.span_store import SpanStore
from tests.support.kept_port import keep_port

#: Short, so that tests see the end of a quarantine.
QUARANTINE_HOLD_S = 2.0
#: Generous: several builds may share two cores.
READY_TIMEOUT_S = 240.0
STOP_TIMEOUT_S = 60.0
#: For states that must come; far below what a leak would wait for.
WITHIN_S = 15.0
#: Until what earlier tests have left is over; above every lease.
IDLE_WITHIN_S = 90.0
SCRAPE_TIMEOUT_S = 60.0
#: Whoever waited for one of these times instead of being told would wait long. None of them runs
#: out because a busy machine stands still for some seconds.
PATIENT = {
    "prefill": ("--pair-silence-s=10", "--control-timeout-s=30"),
    "decode": ("--pair-silence-s=10", "--progress-timeout-s=60"),
    "router": ("--worker-silence-s=10", "--control-timeout-s=30", "--prefill-linger-s=30"),
}


@dataclass(frozen=True)
class Level:
    """Memory and queues of one process as its metrics tell them."""

    free_and_quarantined_blocks: float
    quarantined_blocks: float
    free_and_quarantined_bytes: float
    quarantined_bytes: float
    pinned_blocks: float
    pinned_bytes: float
    running: float
    waiting: float
    open_transfers: float

    @classmethod
    def of(cls, scraped: Scrape) -> "Level":
        """Reads a level; what a process does not have counts as 0."""

        def gauge(name: str, unit: str = "") -> float:
            return scraped.total(name.replace(".", "_") + unit)

        quarantined_blocks = gauge(semconv.KV_BLOCK_QUARANTINED)
        quarantined_bytes = gauge(semconv.EMBEDDING_BYTES_QUARANTINED, "_bytes")
        blocks = gauge(semconv.KV_BLOCK_FREE) + quarantined_blocks
        byte_count = gauge(semconv.EMBEDDING_BYTES_FREE, "_bytes") + quarantined_bytes
        return cls(
            free_and_quarantined_blocks=blocks,
            quarantined_blocks=quarantined_blocks,
            free_and_quarantined_bytes=byte_count,
            quarantined_bytes=quarantined_bytes,
            pinned_blocks=gauge(semconv.KV_BLOCK_LIMIT) - blocks,
            pinned_bytes=gauge(semconv.EMBEDDING_BYTES_LIMIT, "_bytes") - byte_count,
            running=gauge(semconv.REQUEST_RUNNING),
            waiting=gauge(semconv.REQUEST_WAITING),
            open_transfers=gauge(semconv.TRANSFER_OPEN),
        )

    @property
    def is_idle(self) -> bool:
        """Nothing runs, waits or is under way, and no memory is in use."""
        work = self.running or self.waiting or self.open_transfers
        return not (work or self.pinned_blocks or self.pinned_bytes)

    def is_back_at(self, idle: "Level") -> bool:
        """Free plus quarantined as when idle; queues and transfers not above it."""
        return (
            self.free_and_quarantined_blocks == idle.free_and_quarantined_blocks
            and self.free_and_quarantined_bytes == idle.free_and_quarantined_bytes
            and self.running <= idle.running
            and self.waiting <= idle.waiting
            and self.open_transfers <= idle.open_transfers
        )


class TestFleet(Fleet):
    """A fleet on 127.0.0.1 with its own OTLP receiver. Made by :func:`fleet_of`."""

    __test__ = False

    def __init__(self, plan: FleetPlan, log_folder: Path, spans: SpanStore, endpoint: str) -> None:
        super().__init__(plan, log_folder, otlp_endpoint=endpoint, ready_timeout_s=READY_TIMEOUT_S)
        #: Every span the fleet has exported.
        self.spans = spans
        #: By process that was killed, until it is ready again.
        self._ports: dict[str, socket.socket] = {}

    def process(self, name: str) -> ServiceProcess:
        """A process by name, such as ``decode-0``."""
        return self.processes[name]

    def signal(self, name: str, number: signal.Signals) -> None:
        """Sends a signal: SIGKILL for a crash, SIGSTOP and SIGCONT for a hang."""
        self.processes[name].send_signal(number)

    def kill_one(self, name: str) -> None:
        """A crash: SIGKILL, gone when this returns. Its port stays its own."""
        process = self.processes[name]
        process.kill()
        self._ports.setdefault(name, keep_port(process.address))

    def restart(self, name: str) -> ServiceProcess:
        """Starts an ended process again, on the same port."""
        process = self.processes[name]
        assert not process.running, f"{name} still runs"
        with self._ports.pop(name, None) or keep_port(process.address):
            process.restart_on(process.address)
            process.wait_ready(self._ready_timeout_s)
        return process

    def free_ports(self) -> None:
        """Gives up the ports of processes that were killed."""
        for kept in self._ports.values():
            kept.close()

    def scrape(self, name: str) -> Scrape:
        """The metrics of a process now."""
        return scrape(self.processes[name].metrics_address, SCRAPE_TIMEOUT_S)

    def levels(self) -> dict[str, Level]:
        """Levels of all running processes by name."""
        return {
            name: Level.of(self.scrape(name))
            for name, process in self.processes.items()
            if process.running
        }

    def idle_level(self) -> dict[str, Level]:
        """The levels with no request in the system: take it before the first one.

        Waits for the end of earlier ones: an answer ends before its workers are done with it.
        """
        last: dict[str, Level] = {}

        def changing() -> dict[str, object]:
            nonlocal last
            before, last = last, self.levels()
            return {
                name: level
                for name, level in last.items()
                if not level.is_idle or level != before.get(name)
            }

        _until(changing, time.monotonic() + IDLE_WITHIN_S, "not idle")
        return last

    def assert_back_to_idle(
        self,
        idle: Mapping[str, Level],
        within_s: float = WITHIN_S,
        *,
        settled_within_s: float = 0.0,
    ) -> None:
        """Fails unless every running process is back at ``idle`` in time.

        With ``settled_within_s`` quarantine must also be empty by then.
        """
        deadline = time.monotonic() + within_s
        _until(lambda: self._not_back(idle), deadline, "not back to idle")
        if settled_within_s:
            deadline = time.monotonic() + settled_within_s
            _until(self._quarantined, deadline, "still in quarantine")

    def trace(self, trace_id: str, *, within_s: float = 30.0, count: int = 1) -> list[ReceivedSpan]:
        """A trace's spans once ``count`` have arrived and no more came for a moment."""
        deadline = time.monotonic() + within_s
        seen = -1
        while time.monotonic() < deadline:
            spans = self.spans.spans(trace_id)
            if len(spans) >= count and len(spans) == seen:
                return spans
            seen = len(spans)
            time.sleep(0.5)  # longer than the batch delay of the exporters
        names = [span.name for span in self.spans.spans(trace_id)]
        raise AssertionError(f"{len(names)} of {count} spans of {trace_id} arrived: {names}")

    def resident_bytes(self, name: str) -> int:
        """Resident memory of a process."""
        return int(psutil.Process(self.processes[name].pid).memory_info().rss)

    def open_files(self, name: str) -> int:
        """File descriptors of a process, sockets included."""
        return int(psutil.Process(self.processes[name].pid).num_fds())

    def loaded_modules(self, name: str) -> set[str]:
        """Files mapped into a process: which libraries it has loaded."""
        return {mapped.path for mapped in psutil.Process(self.processes[name].pid).memory_maps()}

    def log_files(self, role: str) -> list[Path]:
        """Logs of a role's processes, of every start."""
        return sorted(self._log_folder.glob(f"{role}-*.log"))

    def logs(self) -> str:
        """The end of every log."""
        return "\n".join(
            f"--- {name} (exit status {process.exit_status})\n" + process.log()[-4000:]
            for name, process in self.processes.items()
        )

    def left_behind(self) -> dict[str, object]:
        """Live processes that members of the fleet have started; zombies do not count."""
        names = {process.pid: name for name, process in self.processes.items()}
        found: dict[str, object] = {}
        for process in psutil.process_iter(["status", "cmdline"]):
            with contextlib.suppress(ProcessLookupError, psutil.NoSuchProcess):
                name = names.get(os.getpgid(process.pid))
                if name and process.info["status"] != psutil.STATUS_ZOMBIE:
                    found[f"{name}: {process.pid}"] = process.info["cmdline"]
        return found

    def _not_back(self, idle: Mapping[str, Level]) -> dict[str, object]:
        now = self.levels()
        return {
            name: {"now": level, "idle": idle[name]}
            for name, level in now.items()
            if not level.is_back_at(idle[name])
        }

    def _quarantined(self) -> dict[str, object]:
        return {
            name: level
            for name, level in self.levels().items()
            if level.quarantined_blocks or level.quarantined_bytes
        }


@contextlib.contextmanager
def fleet_of(
    model: Path,
    *,
    encoders: int = 1,
    prefills: int = 1,
    decodes: int = 1,
    unified: int = 0,
    flags: Mapping[str, Sequence[str]] | None = None,
    worker_flags: Mapping[str, Sequence[str]] | None = None,
    environment: Mapping[str, str] | None = None,
) -> Iterator[TestFleet]:
    """A running fleet; its processes are gone afterwards, and its logs shown if the test failed.

    ``flags`` are per role, ``worker_flags`` per process name. Timeouts are longer than the
    defaults, see ``PATIENT``: tests that wait for one set it.
    """
    plan = FleetPlan(
        model,
        encoders,
        prefills,
        decodes,
        unified,
        flags={role: (*PATIENT.get(role, ()), *(flags or {}).get(role, ())) for role in ROLES},
        worker_flags=worker_flags or {},
        environment={"OMP_NUM_THREADS": "1", "EPD_THREADS": "1", **(environment or {})},
    )
    spans = SpanStore()
    with (
        tempfile.TemporaryDirectory(prefix="epd-fleet-") as folder,
        OtlpReceiver(spans) as receiver,
    ):
        fleet = TestFleet(plan, Path(folder), spans, receiver.endpoint)
        try:
            fleet.start()
            yield fleet
            stopped = [process for process in fleet.processes.values() if process.running]
            fleet.stop(STOP_TIMEOUT_S)
            badly = {p.name: p.exit_status for p in stopped if p.exit_status != 0}
            assert not badly, f"exit statuses after a stop: {badly}"
        except BaseException:
            print(fleet.logs())
            raise
        finally:
            fleet.kill()
            fleet.free_ports()
            _until(fleet.left_behind, time.monotonic() + 20.0, "processes left behind")


def _until(problem: Callable[[], Mapping[str, object]], deadline: float, what: str) -> None:
    """Waits until ``problem`` is empty; scrapes at least once."""
    while True:
        found = problem()
        if not found:
            return
        assert time.monotonic() < deadline, f"{what}: {found}"
        time.sleep(0.05)
