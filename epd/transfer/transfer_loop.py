"""What the agent thread does, over and over."""

import logging
import queue
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from epd.errors import EpdError, UnavailableError
from epd.transfer.base import TransferBackend
from epd.transfer.call import BackendCall
from epd.transfer.counters import TransferCounters
from epd.transfer.job import JobState, TransferJob
from epd.transfer.poll_wait import SHORTEST_WAIT_S, PollWait
from epd.transfer.renewal import Renewal

log = logging.getLogger(__name__)

NoticeCallback = Callable[[list[tuple[str, bytes]]], None]


@dataclass(frozen=True)
class AgentConfig:
    """Seconds and bytes of the agent thread.

    Between posts of at most ``piece_bytes`` notices are drained where any are announced. The thread
    polls every ``poll_s``, and more often just after something has moved, while transfers run or
    somebody has announced that a peer's are due, else every ``idle_poll_s``: without a progress
    thread in the library a passive side makes progress only when it polls, and a WRITE to one that
    sleeps takes as long as its nap. ``max_in_flight`` bounds the transfers with each peer: those
    with a peer that hangs do not end, and must not keep others from theirs. A connection that is to
    be made anew waits ``reconnect_patience_s`` for what is in flight, and new ones wait for it.
    """

    piece_bytes: int = 32 << 20
    poll_s: float = 0.0002
    idle_poll_s: float = 0.01
    max_in_flight: int = 64
    max_open: int = 65536
    release_patience_s: float = 0.5
    reconnect_patience_s: float = 2.0
    call_timeout_s: float = 30.0


class TransferLoop:
    """Commands in, transfers forward, notices out. Runs on the agent thread.

    Other threads may only put into ``commands`` and set ``subscribers`` (a whole new list),
    ``announced`` and ``stop_by``.
    """

    def __init__(self, config: AgentConfig, counters: TransferCounters) -> None:
        #: None only ends a wait.
        self.commands: queue.SimpleQueue[TransferJob | BackendCall[Any] | Renewal | None] = (
            queue.SimpleQueue()
        )
        self.subscribers: list[NoticeCallback] = []
        self.announced = 0
        #: Monotonic time at which running transfers are left alone, once stopping.
        self.stop_by: float | None = None
        #: Transfers that have ended, whichever way.
        self.ended = 0
        self._config = config
        self._counters = counters
        self._jobs: list[TransferJob] = []
        self._renewals: dict[str, Renewal] = {}  # by agent name

    def run(self, backend: TransferBackend) -> None:
        """Returns once ``stop_by`` is set and nothing is in flight, or that time has come."""
        wait, wait_s = PollWait(), 0.0
        while True:
            self._take_commands(backend, wait_s)
            moved = self._advance(backend)
            noticed = self._drain(backend)
            if self.stop_by is not None and (
                time.monotonic() > self.stop_by or not any(job.in_flight for job in self._jobs)
            ):
                return
            busy = self._jobs or self.announced
            wait_s = wait.after(moved or noticed, self._config.poll_s)
            if not busy and not (moved or noticed):
                wait_s = self._config.idle_poll_s
            elif noticed and not self._jobs:
                wait_s = SHORTEST_WAIT_S  # whoever was told needs the interpreter now

    def abandon(self, error: EpdError) -> None:
        """Fails everything open. Nobody may put commands any more."""
        for job in self._jobs:
            job.abandon(error)
        for renewal in self._renewals.values():
            renewal.abandon(error)
        while not self.commands.empty():
            command = self.commands.get_nowait()
            if command is not None:
                command.abandon(error)

    def remove_peer(self, backend: TransferBackend, agent_name: str) -> None:
        """Forgets a peer, also one whose connection was about to be made anew. Agent thread."""
        renewal = self._renewals.pop(agent_name, None)
        if renewal is not None:
            renewal.abandon(UnavailableError(f"{agent_name} has gone"))
        backend.remove_peer(agent_name)

    def _take_commands(self, backend: TransferBackend, wait_s: float) -> None:
        """Takes every waiting command; waits up to ``wait_s`` for the first."""
        try:
            command = self.commands.get(timeout=wait_s) if wait_s else self.commands.get_nowait()
            while True:
                if isinstance(command, TransferJob):
                    self._jobs.append(command)
                elif isinstance(command, Renewal):
                    first = self._renewals.setdefault(command.agent_name, command)
                    if first is not command:
                        first.join(command)
                elif command is not None:
                    command.run(backend)
                command = self.commands.get_nowait()
        except queue.Empty:
            return

    def _advance(self, backend: TransferBackend) -> bool:
        """One round over all transfers; True when any has moved."""
        in_flight = Counter(job.order.peer for job in self._jobs if job.in_flight)
        moved = self._renew(backend, in_flight)
        remaining = []
        for job in self._jobs:
            fresh, peer = not job.in_flight, job.order.peer
            waits = peer in self._renewals or in_flight[peer] >= self._config.max_in_flight
            if fresh and (waits or self.stop_by is not None):
                remaining.append(job)
                continue
            state = job.advance(backend)
            in_flight[peer] += job.in_flight - (not fresh)
            if state is JobState.OVER:
                self.ended += 1
                self._counters.record(job.order.operation, job.outcome)
                job.conclude()  # last: who sees the future complete sees it counted
            else:
                remaining.append(job)
            if state is not JobState.WAITING:
                moved = True
                if self.announced:
                    self._drain(backend)  # a post takes a while where it copies
        self._jobs = remaining
        return moved

    def _renew(self, backend: TransferBackend, in_flight: Counter[str]) -> bool:
        """Makes connections anew that nothing runs over; True when that was so for any."""
        moved = False
        for agent_name, renewal in list(self._renewals.items()):
            if in_flight[agent_name] and not renewal.lapsed:
                continue
            del self._renewals[agent_name]
            moved = True
            if in_flight[agent_name]:
                renewal.give_up()
            else:
                renewal.run(backend)
        return moved

    def _drain(self, backend: TransferBackend) -> bool:
        """Hands notices to the subscribers; True when there were any."""
        arrived = backend.notices()
        if not arrived:
            return False
        self._counters.notices += len(arrived)
        for callback in self.subscribers:
            try:
                callback(arrived)
            except Exception:
                self._counters.callback_errors += 1
                log.exception("a subscriber to notices failed")
        return True
