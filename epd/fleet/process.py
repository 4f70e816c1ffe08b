"""One service process: start, READY line, stop, log."""

import contextlib
import os
import re
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

POLL_S = 0.02
_READY = re.compile(r"^READY role=(\S+) address=(\S+) metrics=(\S*)(?: http=(\S+))?$", re.MULTILINE)


class FleetError(Exception):
    """A process did not do what it should; the text is one line for people."""


@dataclass(frozen=True)
class Ready:
    """What a READY line says; ``metrics`` and ``http`` are empty when the endpoint is off."""

    address: str
    metrics: str
    http: str = ""


class ServiceProcess:
    """A service with its output in a file.

    The process leads a session of its own, so that Ctrl-C in a terminal reaches only its parent,
    and its standard input is a pipe that ends with its parent (see ``--follow-stdin``).

    Args:
        role: encoder, prefill, decode or router.
        name: Unique in the fleet, names the log file.
        command: Program and arguments.
        environment: Its whole environment.
        log_folder: Where its output goes.
    """

    def __init__(
        self,
        role: str,
        name: str,
        command: Sequence[str],
        environment: Mapping[str, str],
        log_folder: Path,
    ) -> None:
        self.role = role
        self.name = name
        self._command = list(command)
        self._environment = dict(environment)
        self._log_folder = log_folder
        self._starts = 0
        self._process: subprocess.Popen[bytes] | None = None
        self._ready: Ready | None = None

    @property
    def pid(self) -> int:
        """Process id; the process must have been started."""
        assert self._process is not None
        return self._process.pid

    @property
    def running(self) -> bool:
        """False before the start and after the end."""
        return self._process is not None and self._process.poll() is None

    @property
    def exit_status(self) -> int | None:
        """As subprocess gives it: negative for a signal, None while it runs."""
        return self._process.poll() if self._process else None

    @property
    def address(self) -> str:
        """host:port of its gRPC endpoint; it must be ready."""
        assert self._ready is not None
        return self._ready.address

    @property
    def metrics_address(self) -> str:
        """host:port of its Prometheus endpoint; it must be ready."""
        assert self._ready is not None
        return self._ready.metrics

    @property
    def http_address(self) -> str:
        """host:port of its HTTP face, empty when it has none; it must be ready."""
        assert self._ready is not None
        return self._ready.http

    @property
    def log_file(self) -> Path:
        """Output of the latest start."""
        return self._log_folder / f"{self.name}-{self._starts}.log"

    def start(self) -> None:
        """Starts the process; :meth:`wait_ready` tells when it serves."""
        assert not self.running, f"{self.name} runs already"
        self._starts += 1
        self._ready = None
        self._log_folder.mkdir(parents=True, exist_ok=True)
        with self.log_file.open("wb") as log:
            self._process = subprocess.Popen(
                self._command,
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=self._environment,
                start_new_session=True,
            )

    def restart_on(self, address: str) -> None:
        """Starts an ended process again on the port it had."""
        port = address.rpartition(":")[2]
        self._command = [part for part in self._command if not part.startswith("--port=")]
        self._command.append(f"--port={port}")
        self.start()

    def wait_ready(self, timeout_s: float) -> Ready:
        """Waits for the READY line.

        Raises:
            FleetError: the process ended, or did not get ready in time.
        """
        deadline = time.monotonic() + timeout_s
        while self._ready is None:
            ended = self.exit_status
            found = _READY.search(self.log())
            if found:
                self._ready = Ready(found[2], found[3], found[4] or "")
            elif ended is not None:
                raise FleetError(f"{self.name} ended with status {ended}: {self.last_line()}")
            elif time.monotonic() > deadline:
                raise FleetError(
                    f"{self.name} was not ready after {timeout_s:g} s, see {self.log_file}"
                )
            else:
                time.sleep(POLL_S)
        return self._ready

    def send_signal(self, number: signal.Signals) -> None:
        """Sends a signal to the process if it runs."""
        if self._process is not None:
            self._process.send_signal(number)

    def wait(self, timeout_s: float) -> int | None:
        """Its exit status, None when it still runs after that time."""
        assert self._process is not None
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(timeout_s)
        return self._process.poll()

    def kill(self) -> None:
        """Ends it, and whatever it has started, at once."""
        if self._process is None:
            return
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        if self._process.stdin:
            self._process.stdin.close()

    def log(self) -> str:
        """Its output so far."""
        return self.log_file.read_text(encoding="utf-8", errors="replace")

    def last_line(self) -> str:
        """The last line of its output: after a failed start, the reason."""
        lines = self.log().strip().splitlines()
        return lines[-1] if lines else "it wrote nothing"
