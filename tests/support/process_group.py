"""A command and all that it starts, gone when the call returns."""

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import psutil

#: From SIGKILL until the kernel has taken the processes away.
GONE_WITHIN_S = 20.0


class CommandFailedError(Exception):
    """The command ended with another status than 0, or not in time; says so with its last words."""


def run_command(
    command: Sequence[str], log: Path, *, timeout_s: float, environment: Mapping[str, str]
) -> None:
    """Runs a command in a process group of its own, its output in ``log``.

    Raises:
        CommandFailedError: It failed, or has not ended after ``timeout_s``.
        AssertionError: It ended well and left processes behind; they are killed.
    """
    with log.open("wb") as output:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env=dict(environment),
            start_new_session=True,
        )
    try:
        status = process.wait(timeout_s)
        left = members(process.pid)
    except subprocess.TimeoutExpired:
        raise CommandFailedError(f"no end after {timeout_s:g} s: {_end_of(log)}") from None
    finally:
        _kill_group(process)
    if status != 0:
        raise CommandFailedError(f"exit status {status}: {_end_of(log)}")
    assert not left, f"left behind: {left}"


def members(group: int) -> list[list[str]]:
    """Command lines of a group's live processes; zombies do not count."""
    found = []
    for process in psutil.process_iter(["status", "cmdline"]):
        with contextlib.suppress(ProcessLookupError, psutil.NoSuchProcess):
            if os.getpgid(process.pid) == group and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process.info["cmdline"] or [])
    return found


def _kill_group(process: subprocess.Popen[bytes]) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait(GONE_WITHIN_S)
    deadline = time.monotonic() + GONE_WITHIN_S
    while left := members(process.pid):
        assert time.monotonic() < deadline, f"still there after SIGKILL: {left}"
        time.sleep(0.05)


def _end_of(log: Path, lines: int = 30) -> str:
    return "\n".join(log.read_text(encoding="utf-8", errors="replace").splitlines()[-lines:])
