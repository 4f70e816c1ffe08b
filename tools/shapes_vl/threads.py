"""Choosing the number of threads from what other programs leave free.

A parallel region is as slow as its slowest thread.  On a processor that is shared with other
work, a low-priority thread that has to wait for its core makes all the others wait too; fewer
threads are then faster.
"""

from __future__ import annotations

import os
import time
from pathlib import Path

import torch

_STATISTICS = Path("/proc/stat")


class ThreadChooser:
    """Keeps torch at ``most`` threads, less the cores that other programs keep busy."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._others = 0.0  # cores used by others, a running mean
        self._busy, self._own, self._wall = _busy_seconds(), _own_seconds(), time.monotonic()

    def update(self) -> int:
        """Look at the time since the last call, set the number of threads and return it."""
        busy, own, wall = _busy_seconds(), _own_seconds(), time.monotonic()
        if wall - self._wall > 0.2:
            others = ((busy - self._busy) - (own - self._own)) / (wall - self._wall)
            self._others = 0.4 * self._others + 0.6 * max(others, 0.0)
            self._busy, self._own, self._wall = busy, own, wall
        free = (os.cpu_count() or self._most) - self._others
        threads = min(self._most, max(1, int(free + 0.65)))
        if threads != torch.get_num_threads():
            torch.set_num_threads(threads)
        return threads


def _busy_seconds() -> float:
    """Processor seconds used by all programs since the machine started (0 if unknown)."""
    if not _STATISTICS.exists():
        return 0.0
    fields = [int(field) for field in _STATISTICS.read_text().split("\n", 1)[0].split()[1:9]]
    idle = fields[3] + fields[4]
    return (sum(fields) - idle) / os.sysconf("SC_CLK_TCK")


def _own_seconds() -> float:
    times = os.times()
    return times.user + times.system
