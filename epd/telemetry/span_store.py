"""Received spans by trace, bounded, in memory."""

import threading
from collections import OrderedDict
from collections.abc import Iterable
from typing import Protocol

from epd.telemetry.received_span import ReceivedSpan


class SpanSink(Protocol):
    """Takes spans from a receiver's threads."""

    def add(self, spans: Iterable[ReceivedSpan]) -> None:
        """Keeps the spans."""


class SpanStore:
    """Keeps the newest ``max_traces`` traces in memory, of each at most ``max_spans`` spans."""

    def __init__(self, max_traces: int = 10_000, max_spans: int = 10_000) -> None:
        self._max_traces = max_traces
        self._max_spans = max_spans
        self._lock = threading.Lock()
        self._traces: OrderedDict[str, list[ReceivedSpan]] = OrderedDict()
        #: Spans that found no room.
        self.dropped = 0

    def add(self, spans: Iterable[ReceivedSpan]) -> None:
        """Keeps the spans; the oldest trace goes when there are too many."""
        with self._lock:
            for span in spans:
                kept = self._traces.setdefault(span.trace_id, [])
                if len(kept) < self._max_spans:
                    kept.append(span)
                else:
                    self.dropped += 1
            while len(self._traces) > self._max_traces:
                self.dropped += len(self._traces.popitem(last=False)[1])

    def trace_ids(self) -> list[str]:
        """Ids of the traces kept, oldest first."""
        with self._lock:
            return list(self._traces)

    def spans(self, trace_id: str) -> list[ReceivedSpan]:
        """Spans of a trace by start; empty when it is unknown."""
        with self._lock:
            return sorted(self._traces.get(trace_id, ()), key=lambda span: span.start_ns)

    def clear(self) -> None:
        """Forgets everything."""
        with self._lock:
            self._traces.clear()
