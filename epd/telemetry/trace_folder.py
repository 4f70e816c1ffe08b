"""Received spans by trace, bounded, in a folder."""

import threading
from collections.abc import Iterable
from pathlib import Path

from epd.telemetry.received_span import ReceivedSpan


class TraceFolder:
    """Keeps the newest ``max_traces`` traces as one file of JSON lines each."""

    def __init__(self, folder: Path, max_traces: int = 200) -> None:
        self._folder = folder
        self._max_traces = max_traces
        self._lock = threading.Lock()

    def add(self, spans: Iterable[ReceivedSpan]) -> None:
        """Appends the spans to their traces' files and removes the oldest files."""
        by_trace: dict[str, list[str]] = {}
        for span in spans:
            by_trace.setdefault(span.trace_id, []).append(span.to_json() + "\n")
        with self._lock:
            self._folder.mkdir(parents=True, exist_ok=True)
            for trace_id, lines in by_trace.items():
                with self._file(trace_id).open("a", encoding="utf-8") as file:
                    file.writelines(lines)
            for trace_id in self.trace_ids()[: -self._max_traces]:
                self._file(trace_id).unlink(missing_ok=True)

    def trace_ids(self) -> list[str]:
        """Ids of the traces kept, by their last change, oldest first."""
        files = [(path.stat().st_mtime_ns, path.stem) for path in self._folder.glob("*.jsonl")]
        return [stem for _, stem in sorted(files)]

    def spans(self, trace_id: str) -> list[ReceivedSpan]:
        """Spans of a trace by start; empty when it is unknown."""
        try:
            lines = self._file(trace_id).read_text(encoding="utf-8").splitlines()
        except FileNotFoundError:
            return []
        return sorted(map(ReceivedSpan.from_json, lines), key=lambda span: span.start_ns)

    def _file(self, trace_id: str) -> Path:
        return self._folder / f"{trace_id}.jsonl"
