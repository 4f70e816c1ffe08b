"""What enters and leaves the prefix cache, numbered, for routers that follow it. Plain Python."""

import threading
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class KvEvent:
    """One change. ``cleared``: forget everything before it, then apply ``stored``."""

    sequence: int
    stored: tuple[bytes, ...] = ()
    removed: tuple[bytes, ...] = ()
    cleared: bool = False


class KvEventLog:
    """Keeps the last ``capacity`` changes; whoever fell behind them starts over from a full list.

    Thread-safe: the pool records on the engine thread, subscribers poll from theirs.
    """

    def __init__(self, capacity: int = 4096) -> None:
        self._lock = threading.Lock()
        self._events: deque[KvEvent] = deque(maxlen=capacity)
        self._stored: dict[bytes, None] = {}
        self._sequence = 0

    def record(self, stored: Sequence[bytes] = (), removed: Sequence[bytes] = ()) -> None:
        """Appends one change; an empty one is no change."""
        if not stored and not removed:
            return
        with self._lock:
            self._sequence += 1
            for block_hash in removed:
                del self._stored[block_hash]
            self._stored.update(dict.fromkeys(stored))
            self._events.append(KvEvent(self._sequence, tuple(stored), tuple(removed)))

    def subscribe(self) -> "KvEventSubscription":
        """A reader of its own position; its first poll yields everything stored."""
        return KvEventSubscription(self)

    def since(self, sequence: int | None) -> list[KvEvent]:
        """Changes after ``sequence``; one clearing event with the full list when some are lost."""
        with self._lock:
            oldest = self._events[0].sequence if self._events else self._sequence + 1
            if sequence is None or sequence + 1 < oldest:
                return [KvEvent(self._sequence, tuple(self._stored), cleared=True)]
            return list(self._events)[sequence + 1 - oldest :]


class KvEventSubscription:
    """One follower's position. Not shared between threads."""

    def __init__(self, log: KvEventLog) -> None:
        self._log = log
        self._sequence: int | None = None

    def poll(self) -> list[KvEvent]:
        """Changes since the last poll, without waiting; at most the log's capacity of them."""
        events = self._log.since(self._sequence)
        if events:
            self._sequence = events[-1].sequence
        return events
