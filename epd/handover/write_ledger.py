"""Accounts of one push's WRITEs."""

import asyncio
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass

from epd.handover.push_timing import exposed_ns, hidden_ns
from epd.transfer.base import TransferResult

#: Stands for the layers in the account of the seal's WRITE.
SEAL = range(0)


@dataclass(frozen=True)
class PushReport:
    """What a finished push moved, from the transfer library's telemetry; the seal is included.

    ``layer_ns``: summed time of the WRITEs of each layer, from posting to completion; layers that
    travelled together share it evenly.
    """

    byte_count: int
    descriptor_count: int
    write_count: int
    exposed_ns: int
    #: The same without the seal's WRITE.
    kv_exposed_ns: int
    hidden_ns: int
    layer_ns: tuple[int, ...]


@dataclass(frozen=True)
class _Done:
    layers: range
    started_ns: int
    ended_ns: int
    result: TransferResult


class WriteLedger:
    """Which WRITEs run and what the finished ones did.

    :meth:`opened` and :meth:`grown` are called on the thread that hands a WRITE to the agent,
    :meth:`done` and :meth:`ended` on the agent thread, the rest on the event loop that made the
    ledger.
    """

    def __init__(self, layer_count: int) -> None:
        self._layer_count = layer_count
        self._loop = asyncio.get_running_loop()
        self._idle = asyncio.Event()
        self._lock = threading.Lock()
        self._in_flight = 0
        self._moved_ns = 0
        self._done: list[_Done] = []
        #: KV WRITEs and their bytes so far, the seal not included.
        self.kv_writes = 0
        self.kv_bytes = 0

    @property
    def in_flight(self) -> int:
        """WRITEs handed to the agent that have not ended."""
        return self._in_flight

    @property
    def stalled_s(self) -> float:
        """Seconds for which WRITEs have been open and none has ended."""
        with self._lock:
            return (time.monotonic_ns() - self._moved_ns) / 1e9 if self._in_flight else 0.0

    @property
    def first_posted_ns(self) -> int:
        """When the first of the finished WRITEs was posted, on the clock of ``monotonic_ns``; at
        most a poll's interval too late.
        """
        return min(one.started_ns for one in self._done)

    def opened(self, kv_bytes: int) -> int:
        """Notes a WRITE about to be handed over; returns its ordinal among the KV WRITEs.

        ``kv_bytes`` is 0 for the seal's.
        """
        with self._lock:
            ordinal = self.kv_writes
            if kv_bytes:
                self.kv_writes += 1
                self.kv_bytes += kv_bytes
            if not self._in_flight:
                self._moved_ns = time.monotonic_ns()
            self._in_flight += 1
        return ordinal

    def grown(self, kv_bytes: int) -> None:
        """Notes that an open KV WRITE will carry more."""
        with self._lock:
            self.kv_bytes += kv_bytes

    def done(self, layers: range, result: TransferResult) -> None:
        """Notes what a WRITE of some layers did, or the seal's."""
        now = time.monotonic_ns()
        self._done.append(_Done(layers, now - result.transfer_ns, now, result))

    def ended(self) -> None:
        """Notes that a WRITE does not run any more, whichever way it ended."""
        with self._lock:
            self._in_flight -= 1
            self._moved_ns = time.monotonic_ns()
            over = not self._in_flight
        if over:
            self._loop.call_soon_threadsafe(self._idle.set)

    async def drained(self) -> None:
        """Waits until nothing is in flight."""
        while self._in_flight:
            self._idle.clear()
            if self._in_flight:  # the last one may have ended just before the clear
                await self._idle.wait()

    def report(self, forward_ended_ns: int) -> PushReport:
        """Totals; complete once nothing is in flight."""
        intervals: Sequence[tuple[int, int]] = [
            (one.started_ns, one.ended_ns) for one in self._done
        ]
        kv_intervals = [(one.started_ns, one.ended_ns) for one in self._done if one.layers]
        layer_ns = [0] * self._layer_count
        for one in self._done:
            for layer in one.layers:
                layer_ns[layer] += one.result.transfer_ns // len(one.layers)
        return PushReport(
            sum(one.result.byte_count for one in self._done),
            sum(one.result.descriptor_count for one in self._done),
            len(self._done),
            exposed_ns(intervals, forward_ended_ns),
            exposed_ns(kv_intervals, forward_ended_ns),
            hidden_ns(intervals, forward_ended_ns),
            tuple(layer_ns),
        )
