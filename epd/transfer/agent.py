"""The thread that owns a transfer backend."""

import contextlib
import logging
import queue
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from epd.errors import EpdError, InternalError, ResourceExhaustedError, UnavailableError
from epd.transfer.base import AgentDescriptor, Segment, TransferBackend, TransferResult
from epd.transfer.counters import TransferCounters
from epd.transfer.job import JobState, TransferJob, TransferOrder

log = logging.getLogger(__name__)

T = TypeVar("T")


class _Call(Generic[T]):
    """A function of the backend on its way to the agent thread."""

    def __init__(self, function: Callable[[TransferBackend], T]) -> None:
        self.function = function
        self.future: Future[T] = Future()

    def run(self, backend: TransferBackend) -> None:
        if not self.future.set_running_or_notify_cancel():
            return
        try:
            self.future.set_result(self.function(backend))
        except Exception as error:  # belongs to the caller; the thread lives on
            self.future.set_exception(error)

    def abandon(self, error: EpdError) -> None:
        if self.future.set_running_or_notify_cancel():
            self.future.set_exception(error)


_Command = TransferJob | _Call[Any] | None  # None only wakes the thread

NoticeCallback = Callable[[list[tuple[str, bytes]]], None]
DeathCallback = Callable[[BaseException], None]


@dataclass(frozen=True)
class AgentConfig:
    """Seconds and bytes of the agent thread.

    Between posts of at most ``piece_bytes`` notices are drained. The thread polls every ``poll_s``
    while transfers run or somebody announced that notices are due, else every ``idle_poll_s``: a
    passive peer makes progress only when it polls.
    """

    piece_bytes: int = 8 << 20
    poll_s: float = 0.0002
    idle_poll_s: float = 0.01
    max_in_flight: int = 64
    max_open: int = 65536
    release_patience_s: float = 0.5
    call_timeout_s: float = 30.0


class TransferAgent:
    """Face of the data plane. Methods may be called from any thread and none waits, but ``start``,
    ``register``, ``descriptor`` and ``stop``, which belong to the start and end of a process.

    The backend is opened, used and closed on the agent thread only. Callbacks (``subscribe``, done
    callbacks of futures, ``on_death``) run there too and must be quick; their exceptions are logged
    and counted. When the thread dies, ``alive`` turns False, every open future fails and the
    ``on_death`` callbacks get the cause.
    """

    def __init__(
        self, open_backend: Callable[[], TransferBackend], config: AgentConfig | None = None
    ) -> None:
        self.config = config or AgentConfig()
        self.counters = TransferCounters()
        self._open_backend = open_backend
        self._commands: queue.SimpleQueue[_Command] = queue.SimpleQueue()
        self._jobs: list[TransferJob] = []
        self._open_count = 0
        self._announced = 0
        self._lock = threading.Lock()  # guards _dead, _announced and _open_count
        self._dead: EpdError | None = UnavailableError("the transfer agent is not started")
        self._subscribers: list[NoticeCallback] = []
        self._death_callbacks: list[DeathCallback] = []
        self._stop_by: float | None = None
        self._thread = threading.Thread(target=self._main, name="transfer-agent", daemon=True)

    @property
    def alive(self) -> bool:
        """The thread runs and takes work."""
        return self._dead is None

    def start(self) -> None:
        """Opens the backend.

        Raises:
            EpdError: the backend cannot be opened.
        """
        self._dead = None
        opened = self._call(lambda backend: None)
        self._thread.start()
        opened.result(self.config.call_timeout_s)

    def stop(self, timeout_s: float = 5.0) -> None:
        """Posts nothing new, lets running transfers end for ``timeout_s``, closes the backend."""
        self._stop_by = time.monotonic() + timeout_s
        self._commands.put(None)
        if self._thread.is_alive():
            self._thread.join(timeout_s + 5.0)

    def register(self, segment: Segment, memory_kind: str = "DRAM") -> None:
        """Makes memory reachable for peers that get the descriptor from now on. Waits.

        Raises:
            TransferFailedError: the library refuses the memory.
        """
        done = self._call(lambda backend: backend.register(segment, memory_kind))
        done.result(self.config.call_timeout_s)

    def descriptor(self) -> AgentDescriptor:
        """What peers need to connect, with all memory registered so far. Waits."""
        return self._call(lambda backend: backend.descriptor()).result(self.config.call_timeout_s)

    def connect(self, peer: AgentDescriptor) -> Future[None]:
        """Gets ready to talk to a peer; fails with TransferFailedError."""
        return self._call(lambda backend: backend.add_peer(peer))

    def disconnect(self, agent_name: str) -> Future[None]:
        """Forgets a peer; an unknown name is fine."""
        return self._call(lambda backend: backend.remove_peer(agent_name))

    def write(
        self,
        peer: str,
        local: Sequence[Segment],
        remote: Sequence[Segment],
        notice: bytes = b"",
        guard: Callable[[], None] | None = None,
    ) -> Future[TransferResult]:
        """Copies ``local`` to the peer's ``remote``; see :meth:`submit`."""
        return self.submit(TransferOrder("WRITE", peer, local, remote, notice, guard))

    def read(
        self,
        peer: str,
        local: Sequence[Segment],
        remote: Sequence[Segment],
        notice: bytes = b"",
        guard: Callable[[], None] | None = None,
    ) -> Future[TransferResult]:
        """Copies the peer's ``remote`` to ``local``; see :meth:`submit`."""
        return self.submit(TransferOrder("READ", peer, local, remote, notice, guard))

    def submit(self, order: TransferOrder) -> Future[TransferResult]:
        """Queues a transfer. The notice reaches the peer after all of the data.

        The future fails with TransferFailedError or with what ``guard`` raised, in both cases after
        the last posted piece has ended (:class:`UnreleasedTransferError` excepted). Cancelling it
        works until the first piece is posted. Queued transfers are posted in order; running ones
        are unordered.
        """
        job = TransferJob(order, self.config.piece_bytes, self.config.release_patience_s)
        with self._lock:
            error = self._dead
            if error is None and self._open_count >= self.config.max_open:
                error = ResourceExhaustedError(f"{self._open_count} transfers are open")
            if error is None:
                self._open_count += 1
                self._commands.put(job)
        if error is not None:
            job.abandon(error)
        return job.future

    def subscribe(self, callback: NoticeCallback) -> None:
        """Calls back with every batch of (agent name, notice), on the agent thread."""
        self._subscribers = [*self._subscribers, callback]

    def unsubscribe(self, callback: NoticeCallback) -> None:
        """Ends a subscription; a batch under way may still come."""
        self._subscribers = [one for one in self._subscribers if one is not callback]

    def on_death(self, callback: DeathCallback) -> None:
        """Calls back with the cause when the thread dies, on the agent thread."""
        self._death_callbacks.append(callback)

    def announce(self) -> None:
        """Notices or a peer's READs are due: poll quickly until the matching :meth:`withdraw`."""
        with self._lock:
            self._announced += 1
        self._commands.put(None)  # ends an idle wait

    def withdraw(self) -> None:
        """Ends one :meth:`announce`."""
        with self._lock:
            assert self._announced > 0
            self._announced -= 1

    def _call(self, function: Callable[[TransferBackend], T]) -> Future[T]:
        call = _Call(function)
        with self._lock:
            error = self._dead
            if error is None:
                self._commands.put(call)
        if error is not None:
            call.abandon(error)
        return call.future

    def _main(self) -> None:
        try:
            backend = self._open_backend()
            self.counters.transport = backend.name
            try:
                self._loop(backend)
                self._end(UnavailableError("the transfer agent has stopped"))
            finally:
                backend.close()
        except BaseException as cause:
            log.critical("the transfer agent died", exc_info=cause)
            error = cause if isinstance(cause, EpdError) else None
            self._end(error or InternalError(f"the transfer agent died: {cause!r}"))
            for callback in self._death_callbacks:
                with contextlib.suppress(Exception):  # the others must still hear of it
                    callback(cause)

    def _loop(self, backend: TransferBackend) -> None:
        wait_s = 0.0
        while True:
            self._take_commands(backend, wait_s)
            moved = self._advance(backend)
            moved = self._drain(backend) or moved
            if self._stop_by is not None and (
                time.monotonic() > self._stop_by or not any(job.in_flight for job in self._jobs)
            ):
                return
            busy = self._jobs or self._announced
            wait_s = 0.0 if moved else self.config.poll_s if busy else self.config.idle_poll_s

    def _take_commands(self, backend: TransferBackend, wait_s: float) -> None:
        """Runs every waiting command; waits up to ``wait_s`` for the first."""
        try:
            command = self._commands.get(timeout=wait_s) if wait_s else self._commands.get_nowait()
            while True:
                if isinstance(command, TransferJob):
                    self._jobs.append(command)
                elif command is not None:
                    command.run(backend)
                command = self._commands.get_nowait()
        except queue.Empty:
            return

    def _advance(self, backend: TransferBackend) -> bool:
        moved = False
        in_flight = sum(job.in_flight for job in self._jobs)
        remaining = []
        for job in self._jobs:
            fresh = not job.in_flight
            if fresh and (in_flight >= self.config.max_in_flight or self._stop_by is not None):
                remaining.append(job)
                continue
            state = job.advance(backend)
            in_flight += job.in_flight - (not fresh)
            if state is JobState.OVER:
                self._count(job)  # first: who sees the future complete sees it counted
                job.conclude()
            else:
                remaining.append(job)
            if state is not JobState.WAITING:
                moved = True
                self._drain(backend)
        self._jobs = remaining
        return moved

    def _drain(self, backend: TransferBackend) -> bool:
        arrived = backend.notices()
        if not arrived:
            return False
        self.counters.notices += len(arrived)
        for callback in self._subscribers:
            try:
                callback(arrived)
            except Exception:
                self.counters.callback_errors += 1
                log.exception("a subscriber to notices failed")
        return True

    def _count(self, job: TransferJob) -> None:
        with self._lock:
            self._open_count -= 1
        writes, reads = self.counters.writes, self.counters.reads
        counters = writes if job.order.operation == "WRITE" else reads
        if isinstance(job.outcome, EpdError):
            counters.failed += 1
        elif job.outcome is not None:
            counters.done += 1
            counters.byte_count += job.outcome.byte_count
            counters.descriptor_count += job.outcome.descriptor_count
            counters.transfer_ns += job.outcome.transfer_ns

    def _end(self, error: EpdError) -> None:
        """Fails everything open; nothing is taken any more."""
        with self._lock:
            self._dead = error
        for job in self._jobs:
            job.abandon(error)
        while not self._commands.empty():
            command = self._commands.get_nowait()
            if command is not None:
                command.abandon(error)
