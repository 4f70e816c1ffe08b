"""One WRITE or READ on its way through the agent thread, piece by piece."""

import collections
import enum
import logging
import time
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager

from epd.errors import EpdError, InternalError, TransferFailedError
from epd.transfer.base import TransferBackend, TransferHandle, TransferResult, TransferState
from epd.transfer.order import TransferOrder
from epd.transfer.pieces import Piece, cut

log = logging.getLogger(__name__)


class JobState(enum.Enum):
    """What a call of :meth:`TransferJob.advance` came to."""

    WAITING = "waiting"
    MOVED = "moved"
    OVER = "over"


class UnreleasedTransferError(TransferFailedError):
    """The transfer failed and the library still holds on to it, so memory may still be touched.

    ``released`` completes once it lets go; until then the buffers stay out of use.
    """

    def __init__(self, message: str, released: "Future[None]") -> None:
        super().__init__(message)
        self.released = released


class TransferJob:
    """State of one transfer. Used by the agent thread only, except for ``future``.

    Pieces are posted one after the other, so the last one's notice follows all the data. ``future``
    completes when nothing of the transfer is in flight any more; :class:`UnreleasedTransferError`
    is the one exception to that.

    A bug in what the caller has given (content, guard) fails this transfer alone: no piece is in
    flight then. What a backend raises beside EpdError is not caught here and ends the agent:
    whether it has posted, and who touches which memory, is not known any more.
    """

    def __init__(self, order: TransferOrder, piece_bytes: int, release_patience_s: float) -> None:
        self.order = order
        self.future: Future[TransferResult] = Future()
        self._piece_bytes = piece_bytes
        self._release_patience_ns = int(release_patience_s * 1e9)
        self._pieces: collections.deque[Piece] = collections.deque()
        self._notice = b""
        self._handle: TransferHandle | None = None
        self._started_ns = 0
        self._results: list[TransferResult] = []
        #: How it ended; None while it runs or when it was cancelled before it began.
        self.outcome: TransferResult | EpdError | None = None
        self._error: EpdError | None = None
        self._failed_ns = 0
        self._released: Future[None] | None = None

    @property
    def in_flight(self) -> bool:
        """The library holds a posted piece."""
        return self._handle is not None

    def advance(self, backend: TransferBackend) -> JobState:
        """Does what can be done without waiting, posting at most one piece.

        After OVER, ``outcome`` is set and :meth:`conclude` is due.
        """
        if self._error is not None:
            return self._release(backend)
        if self._handle is not None:
            state = backend.poll(self._handle)
            if state is TransferState.RUNNING:
                return JobState.WAITING
            if state is TransferState.FAILED:
                self._error = TransferFailedError(f"{self._title} failed while it ran")
                self._failed_ns = time.monotonic_ns()
                return self._release(backend)
            self._results.append(backend.finish(self._handle))
            self._handle = None
            if not self._pieces:
                return self._complete()
        elif not self._started_ns and not self._start():
            return JobState.OVER
        return self._post(backend)

    def conclude(self) -> None:
        """Completes ``future`` with the outcome; its callbacks run inside."""
        if self._released is not None:
            self._released.set_result(None)
        elif isinstance(self.outcome, TransferResult):
            self.future.set_result(self.outcome)
        elif self.outcome is not None:
            self.future.set_exception(self.outcome)

    def abandon(self, error: EpdError) -> None:
        """Fails what is still open, because the agent ends."""
        if self.future.done():
            return
        if self._handle is not None:
            error = UnreleasedTransferError(error.message, Future())
        elif not self._started_ns and not self.future.set_running_or_notify_cancel():
            return
        self.future.set_exception(error)

    @property
    def _title(self) -> str:
        return f"{self.order.operation} with {self.order.peer}"

    def _start(self) -> bool:
        if not self.future.set_running_or_notify_cancel():
            return False
        self._started_ns = time.perf_counter_ns()
        try:
            with self._callers():
                content = self.order.content()
                self._pieces.extend(cut(content.local, content.remote, self._piece_bytes))
        except EpdError as error:
            self.outcome = error
            return False
        self._notice = content.notice
        return True

    @contextmanager
    def _callers(self) -> Iterator[None]:
        """Around what is the caller's; a bug there becomes this transfer's error."""
        try:
            yield
        except EpdError:
            raise
        except Exception as error:
            log.exception("%s cannot be posted", self._title)
            raise InternalError(f"{self._title} cannot be posted: {error!r}") from error

    def _post(self, backend: TransferBackend) -> JobState:
        order = self.order
        try:
            if order.guard is not None:
                with self._callers():
                    order.guard()
            local, remote = self._pieces.popleft()
            notice = b"" if self._pieces else self._notice
            post = backend.write if order.operation == "WRITE" else backend.read
            self._handle = post(order.peer, local, remote, notice)
        except EpdError as error:
            self.outcome = error
            return JobState.OVER
        return JobState.MOVED

    def _release(self, backend: TransferBackend) -> JobState:
        assert self._handle is not None
        assert self._error is not None
        if backend.release(self._handle):
            self._handle = None
            self.outcome = self._error
            return JobState.OVER
        waited = time.monotonic_ns() - self._failed_ns
        if self._released is None and waited > self._release_patience_ns:
            self._released = Future()
            self.future.set_exception(UnreleasedTransferError(self._error.message, self._released))
        return JobState.WAITING

    def _complete(self) -> JobState:
        self.outcome = TransferResult(
            sum(one.byte_count for one in self._results),
            sum(one.descriptor_count for one in self._results),
            sum(one.post_ns for one in self._results),
            time.perf_counter_ns() - self._started_ns,
        )
        return JobState.OVER
