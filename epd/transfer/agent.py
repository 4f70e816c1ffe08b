"""The thread that owns a transfer backend."""

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from typing import TypeVar

from epd.errors import EpdError, InternalError, ResourceExhaustedError, UnavailableError
from epd.thread_slices import copy_promptly, sleep_exactly
from epd.transfer.base import (
    AgentDescriptor,
    Capabilities,
    ReceivePlan,
    Segment,
    TransferBackend,
    TransferResult,
)
from epd.transfer.call import BackendCall
from epd.transfer.counters import TransferCounters
from epd.transfer.job import TransferJob
from epd.transfer.order import TransferContent, TransferOrder
from epd.transfer.renewal import Renewal
from epd.transfer.transfer_loop import AgentConfig, NoticeCallback, TransferLoop

log = logging.getLogger(__name__)

T = TypeVar("T")
DeathCallback = Callable[[BaseException], None]


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
        self._loop = TransferLoop(self.config, self.counters)
        # Guards the two below and the loop's announced and subscribers.
        self._lock = threading.Lock()
        self._dead: EpdError | None = UnavailableError("the transfer agent is not started")
        self._accepted = 0
        self._transports: Mapping[str, Capabilities] = {}
        self._carriers: Callable[[], Mapping[str, Sequence[str]]] = dict
        self._death_callbacks: list[DeathCallback] = []
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
        self._loop.stop_by = time.monotonic() + timeout_s
        self._loop.commands.put(None)
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

    def descriptors(self) -> list[AgentDescriptor]:
        """One for each transport of this process, the preferred one first. Waits."""
        return self._call(lambda backend: backend.descriptors()).result(self.config.call_timeout_s)

    def needs_plan(self, transport: str) -> bool:
        """Whether WRITEs over a transport are refused without a receive plan."""
        return not self._transports[transport].one_sided

    def carriers(self) -> Mapping[str, Sequence[str]]:
        """What really moves the bytes, by transport; see :meth:`TransferBackend.carriers`."""
        return self._carriers()

    def expect(self, plan: ReceivePlan) -> Future[None]:
        """Lets a peer WRITE where a plan says, once the future is done. See :meth:`needs_plan`."""
        return self._call(lambda backend: backend.expect(plan))

    def forget(self, plan_id: int) -> Future[None]:
        """Ends a plan: once the future is done, nothing lands there through it any more."""
        return self._call(lambda backend: backend.forget(plan_id))

    def connect(self, peer: AgentDescriptor) -> Future[None]:
        """Gets ready to talk to a peer; fails with TransferFailedError."""
        return self._call(lambda backend: backend.add_peer(peer))

    def disconnect(self, agent_name: str) -> Future[None]:
        """Forgets a peer; an unknown name is fine."""
        return self._call(lambda backend: self._loop.remove_peer(backend, agent_name))

    def reconnect(self, peer: AgentDescriptor) -> Future[None]:
        """Makes the connection to a peer anew as soon as no transfer with it is in flight; new ones
        wait for that, at most ``reconnect_patience_s``. Fails with TransferFailedError, or with
        UnavailableError when the peer is disconnected meanwhile.
        """
        renewal = Renewal(peer, self.config.reconnect_patience_s)
        self._queue(renewal)
        return renewal.future

    def write(
        self,
        peer: str,
        local: Sequence[Segment],
        remote: Sequence[Segment],
        notice: bytes = b"",
        guard: Callable[[], None] | None = None,
    ) -> Future[TransferResult]:
        """Copies ``local`` to the peer's ``remote``; see :meth:`submit`."""
        content = TransferContent(local, remote, notice)
        return self.write_late(peer, lambda: content, guard)

    def write_late(
        self,
        peer: str,
        content: Callable[[], TransferContent],
        guard: Callable[[], None] | None = None,
    ) -> Future[TransferResult]:
        """A WRITE whose content is asked for when its turn has come; see :meth:`submit`."""
        return self.submit(TransferOrder("WRITE", peer, content, guard))

    def read(
        self,
        peer: str,
        local: Sequence[Segment],
        remote: Sequence[Segment],
        notice: bytes = b"",
        guard: Callable[[], None] | None = None,
    ) -> Future[TransferResult]:
        """Copies the peer's ``remote`` to ``local``; see :meth:`submit`."""
        content = TransferContent(local, remote, notice)
        return self.submit(TransferOrder("READ", peer, lambda: content, guard))

    def submit(self, order: TransferOrder) -> Future[TransferResult]:
        """Queues a transfer. The notice reaches the peer after all of the data.

        The future fails with TransferFailedError or with what ``guard`` raised, in both cases after
        the last posted piece has ended (:class:`UnreleasedTransferError` excepted). Cancelling it
        works until the first piece is posted. Queued transfers with one peer are posted in order;
        running ones are unordered.
        """
        job = TransferJob(order, self.config.piece_bytes, self.config.release_patience_s)
        with self._lock:
            error = self._dead
            if error is None and self._accepted - self._loop.ended >= self.config.max_open:
                error = ResourceExhaustedError(f"{self.config.max_open} transfers are open")
            if error is None:
                self._accepted += 1
                self._loop.commands.put(job)
        if error is not None:
            job.abandon(error)
        return job.future

    def subscribe(self, callback: NoticeCallback) -> None:
        """Calls back with every batch of (agent name, notice), on the agent thread."""
        with self._lock:
            self._loop.subscribers = [*self._loop.subscribers, callback]

    def unsubscribe(self, callback: NoticeCallback) -> None:
        """Ends a subscription; a batch under way may still come."""
        with self._lock:
            left = [one for one in self._loop.subscribers if one is not callback]
            self._loop.subscribers = left

    def on_death(self, callback: DeathCallback) -> None:
        """Calls back with the cause when the thread dies, on the agent thread."""
        self._death_callbacks.append(callback)

    def announce(self) -> None:
        """Notices or a peer's READs are due: poll quickly until the matching :meth:`withdraw`."""
        with self._lock:
            self._loop.announced += 1
        self._loop.commands.put(None)  # ends an idle wait

    def withdraw(self) -> None:
        """Ends one :meth:`announce`."""
        with self._lock:
            assert self._loop.announced > 0
            self._loop.announced -= 1

    def _call(self, function: Callable[[TransferBackend], T]) -> Future[T]:
        call = BackendCall(function)
        self._queue(call)
        return call.future

    def _queue(self, call: BackendCall[T] | Renewal) -> None:
        with self._lock:
            error = self._dead
            if error is None:
                self._loop.commands.put(call)
        if error is not None:
            call.abandon(error)

    def _main(self) -> None:
        copy_promptly()
        sleep_exactly()
        try:
            backend = self._open_backend()
            self.counters.transport = backend.name
            self._transports = backend.transports()
            self._carriers = backend.carriers
            try:
                self._loop.run(backend)
                self._end(UnavailableError("the transfer agent has stopped"))
            finally:
                backend.close()
        except BaseException as cause:
            log.critical("the transfer agent died", exc_info=cause)
            typed = cause if isinstance(cause, EpdError) else None
            self._end(typed or InternalError(f"the transfer agent died: {cause!r}"))
            for callback in self._death_callbacks:
                with contextlib.suppress(Exception):  # the others must still hear of it
                    callback(cause)

    def _end(self, error: EpdError) -> None:
        """Fails everything open; nothing is taken any more."""
        with self._lock:
            self._dead = error
        self._loop.abandon(error)
