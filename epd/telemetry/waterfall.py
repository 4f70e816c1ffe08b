"""A trace as a picture in the terminal: one line per span, hop by hop."""

from collections import defaultdict
from collections.abc import Iterator, Sequence

from rich.console import Console, ConsoleOptions, RenderResult
from rich.table import Table
from rich.text import Text

from epd.telemetry import semconv
from epd.telemetry.received_span import ReceivedSpan

BAR_WIDTH = 48
MIN_BAR_WIDTH = 16
SERVICE_WIDTH = 8
DURATION_WIDTH = 9
_COLOURS = {
    "epd-router": "cyan",
    "epd-encoder": "magenta",
    "epd-prefill": "yellow",
    "epd-decode": "green",
}
#: Shown behind the bar, in this order, with what turns the value into text.
_NOTES = (
    (semconv.EPD_TRANSFER_BYTES, lambda value: f"{value / 1024:,.0f} KiB"),
    (semconv.EPD_TRANSFER_DESCRIPTORS, lambda value: f"{value} descriptors"),
    (semconv.EPD_TRANSFER_TRANSPORT, str),
    (semconv.EPD_TRANSFER_EXPOSED_NS, lambda value: f"exposed {value / 1e6:.2f} ms"),
    (semconv.EPD_TRANSFER_HIDDEN_NS, lambda value: f"hidden {value / 1e6:.2f} ms"),
    (semconv.GEN_AI_USAGE_INPUT_TOKENS, lambda value: f"{value} tokens in"),
    (semconv.GEN_AI_USAGE_OUTPUT_TOKENS, lambda value: f"{value} out"),
    (semconv.ERROR_TYPE, str),
)


class Waterfall:
    """A trace to print: lines in the order of the tree, bars on one time axis.

    Bars take the width that is left; what a span has to tell stands behind its bar where there is
    room, else below. Times are those of each span's own host: between hosts the bars are as good as
    their clocks, the durations are not affected.
    """

    def __init__(self, spans: Sequence[ReceivedSpan]) -> None:
        self._spans = spans

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        if not self._spans:
            yield Text("the trace has no spans")
            return
        origin_ns = min(span.start_ns for span in self._spans)
        total_ns = max(max(span.end_ns for span in self._spans) - origin_ns, 1)
        services = {span.service for span in self._spans}
        yield Text(
            f"trace {self._spans[0].trace_id}: {len(self._spans)} spans, "
            f"{len(services)} services, {total_ns / 1e6:.1f} ms",
            style="bold",
        )
        rows = [(span, _label(span, depth)) for span, depth in _in_tree_order(self._spans)]
        fixed = max(len(label) for _, label in rows) + SERVICE_WIDTH + DURATION_WIDTH + 3
        left = options.max_width - fixed
        notes_width = max(len(_notes(span)) for span in self._spans) + 1
        beside = left - notes_width >= MIN_BAR_WIDTH
        width = max(MIN_BAR_WIDTH, min(BAR_WIDTH, left - notes_width if beside else left))
        table = Table(box=None, padding=(0, 1, 0, 0), pad_edge=False)
        table.add_column("span", no_wrap=True)
        table.add_column("service", no_wrap=True, width=SERVICE_WIDTH)
        table.add_column("ms", justify="right", no_wrap=True, width=DURATION_WIDTH)
        table.add_column("", no_wrap=True, width=width)
        for span, label in rows:
            colour = "red" if span.failed else _COLOURS.get(span.service, "white")
            bar = Text(_bar(span, origin_ns, total_ns, width), style=colour)
            cells = [
                Text(label, style=colour),
                Text(span.service.removeprefix("epd-"), style=colour),
                Text(f"{span.duration_ns / 1e6:.2f}"),
                bar,
            ]
            table.add_row(*cells, *([Text(_notes(span), style="dim")] if beside else []))
        yield table
        if not beside:
            for span, label in rows:
                if _notes(span):
                    yield Text(f"{label.strip()}: {_notes(span)}", style="dim")
        yield from _stages(self._spans)


def _label(span: ReceivedSpan, depth: int) -> str:
    return "  " * depth + span.name.removeprefix("epd.v1.")


def _in_tree_order(spans: Sequence[ReceivedSpan]) -> Iterator[tuple[ReceivedSpan, int]]:
    """Depth first, children by start. A span whose parent was not received counts as a root."""
    known = {span.span_id for span in spans}
    children: dict[str, list[ReceivedSpan]] = defaultdict(list)
    for span in sorted(spans, key=lambda span: (span.start_ns, -span.end_ns)):
        children[span.parent_id if span.parent_id in known else ""].append(span)
    waiting = [(span, 0) for span in reversed(children[""])]
    while waiting:
        span, depth = waiting.pop()
        yield span, depth
        waiting += [(child, depth + 1) for child in reversed(children[span.span_id])]


def _bar(span: ReceivedSpan, origin_ns: int, total_ns: int, width: int) -> str:
    """At least one cell, so that short spans are seen; hidden push time is drawn lighter."""
    first = min(round((span.start_ns - origin_ns) / total_ns * width), width - 1)
    cells = max(1, min(round(span.duration_ns / total_ns * width), width - first))
    exposed_ns = span.attributes.get(semconv.EPD_TRANSFER_EXPOSED_NS)
    hidden = 0
    if exposed_ns is not None and span.duration_ns > 0:
        hidden = max(0, cells - round(exposed_ns / span.duration_ns * cells))
    return " " * first + "░" * hidden + "█" * (cells - hidden)


def _notes(span: ReceivedSpan) -> str:
    return ", ".join(
        as_text(span.attributes[name]) for name, as_text in _NOTES if name in span.attributes
    )


def _stages(spans: Sequence[ReceivedSpan]) -> Iterator[Text]:
    """The router's own account of the critical path, where a span has one."""
    prefix = semconv.EPD_STAGE_NS_PREFIX
    for span in spans:
        stages = [
            f"{name.removeprefix(prefix)} {value / 1e6:.2f} ms"
            for name, value in span.attributes.items()
            if name.startswith(prefix)
        ]
        if stages:
            yield Text("critical path: " + ", ".join(stages))
