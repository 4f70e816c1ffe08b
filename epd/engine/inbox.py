"""What other threads want of the engine, until the engine thread takes it. Plain Python."""

import threading
from dataclasses import dataclass, field

from epd.engine.requests import RequestMode
from epd.engine.sequence import Sequence
from epd.errors import (
    DuplicateRequestError,
    NotFoundError,
    ResourceExhaustedError,
    UnavailableError,
)


@dataclass
class Mail:
    """Everything that came in since the last time, in order of arrival per list."""

    submitted: list[Sequence] = field(default_factory=list)
    sealed: list[str] = field(default_factory=list)
    cancelled: list[str] = field(default_factory=list)
    released: list[str] = field(default_factory=list)


class Inbox:
    """The only place where other threads and the engine thread meet.

    Bounds the waiting queue, counted from submission to admission. PREFILLED requests are never
    refused: their KV is paid for, and the blocks they hold bound them.
    """

    def __init__(self, max_waiting: int) -> None:
        self._max_waiting = max_waiting
        self._changed = threading.Condition()
        self._mail = Mail()
        self._nudged = False
        self._live: dict[str, Sequence] = {}
        self._queued: set[Sequence] = set()
        self._closed: UnavailableError | None = None

    @property
    def queued_count(self) -> int:
        """Requests that wait for admission."""
        return len(self._queued)

    def submit(self, sequence: Sequence) -> None:
        """Takes a new request; errors as in :meth:`Engine.submit`."""
        with self._changed:
            if self._closed is not None:
                raise UnavailableError(self._closed.message, reason=self._closed.reason)
            if sequence.request_id in self._live:
                raise DuplicateRequestError(f"request id {sequence.request_id} is in use")
            full = len(self._queued) >= self._max_waiting
            if full and sequence.mode is not RequestMode.PREFILLED:
                raise ResourceExhaustedError(
                    f"{len(self._queued)} requests wait, no more are taken", reason="QUEUE_FULL"
                )
            if not sequence.arriving:
                self._queued.add(sequence)
            self._live[sequence.request_id] = sequence
            self._mail.submitted.append(sequence)
            self._changed.notify()

    def seal(self, request_id: str, now_ns: int) -> None:
        """The KV of an arriving request is complete; errors as in :meth:`Engine.sealed`."""
        with self._changed:
            sequence = self._live.get(request_id)
            if self._closed is not None:
                raise UnavailableError(self._closed.message, reason=self._closed.reason)
            if sequence is None:
                raise NotFoundError(f"no request {request_id} waits for its KV")
            sequence.arrived_ns = now_ns
            self._queued.add(sequence)
            self._mail.sealed.append(request_id)
            self._changed.notify()

    def cancel(self, request_id: str) -> None:
        """Asks for the end of a request."""
        with self._changed:
            self._mail.cancelled.append(request_id)
            self._changed.notify()

    def release(self, request_id: str) -> None:
        """Gives back the blocks of a PREFILL_ONLY request."""
        with self._changed:
            self._mail.released.append(request_id)
            self._changed.notify()

    def nudge(self) -> None:
        """Makes the engine look again: blocks came free."""
        with self._changed:
            self._nudged = True
            self._changed.notify()

    def close(self, reason: UnavailableError) -> None:
        """Refuses all further requests with ``reason``. The first reason stays."""
        with self._changed:
            self._closed = self._closed or reason
            self._changed.notify()

    @property
    def is_closed(self) -> bool:
        """Whether requests are refused."""
        return self._closed is not None

    @property
    def has_work(self) -> bool:
        """Whether somebody would have something of the next step. Any thread; a moment old."""
        mail = self._mail
        joining = any(not sequence.arriving for sequence in mail.submitted)
        return bool(joining or mail.sealed or mail.cancelled or self._closed)

    def take(self, wait: bool) -> Mail:
        """Engine thread: everything new; if asked, after waiting for something or the closing."""
        with self._changed:
            if wait:
                self._changed.wait_for(self._has_news)
            mail, self._mail, self._nudged = self._mail, Mail(), False
            return mail

    def dequeued(self, sequence: Sequence) -> None:
        """Engine thread: a request no longer waits."""
        with self._changed:
            self._queued.discard(sequence)

    def forget(self, sequence: Sequence) -> None:
        """Engine thread: a request has ended and holds nothing; its id may be used again."""
        with self._changed:
            self._queued.discard(sequence)
            self._live.pop(sequence.request_id, None)

    def live(self, request_id: str) -> Sequence | None:
        """The sequence that has this id, held ones included."""
        return self._live.get(request_id)

    def all_live(self) -> list[Sequence]:
        """Every sequence that has not been forgotten."""
        with self._changed:
            return list(self._live.values())

    def _has_news(self) -> bool:
        mail = self._mail
        return bool(
            self._nudged
            or self._closed
            or mail.submitted
            or mail.sealed
            or mail.cancelled
            or mail.released
        )
