"""Spans from a service to the terminal: export, store, folder, waterfall."""

import asyncio
import io
import time

import pytest
from opentelemetry import trace
from rich.console import Console

from epd.config import ConfigError
from epd.telemetry import semconv
from epd.telemetry.otlp_receiver import OtlpReceiver
from epd.telemetry.received_span import ReceivedSpan
from epd.telemetry.setup import start_telemetry
from epd.telemetry.span_store import SpanStore
from epd.telemetry.spans import record_stage
from epd.telemetry.trace_folder import TraceFolder
from epd.telemetry.waterfall import BAR_WIDTH, Waterfall

MS = 1_000_000


def span(name, start_ms, end_ms, *, span_id="s", parent_id="", service="epd-router", **attributes):
    return ReceivedSpan(
        trace_id="t" * 32,
        span_id=span_id,
        parent_id=parent_id,
        name=name,
        kind="SERVER",
        service=service,
        instance="i",
        start_ns=start_ms * MS,
        end_ns=end_ms * MS,
        failed=False,
        attributes=attributes,
    )


def drawn(spans, width=200):
    console = Console(width=width, record=True, file=io.StringIO())
    console.print(Waterfall(spans))
    return console.export_text()


@pytest.fixture
def exporting(monkeypatch):
    """A service that exports to a receiver, and the store behind it."""
    store = SpanStore()
    with OtlpReceiver(store) as receiver:
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", receiver.endpoint)
        telemetry = start_telemetry("prefill", "i-1")
        yield telemetry, store
        telemetry.close()


def test_a_stage_measured_elsewhere_becomes_a_child_with_its_duration(exporting):
    telemetry, store = exporting
    with telemetry.tracer.start_as_current_span("root"):
        parent = trace.set_span_in_context(trace.get_current_span())
    ended = time.monotonic_ns()
    record_stage(
        telemetry.tracer,
        semconv.SPAN_KV_PUSH,
        start_ns=ended - 5 * MS,
        end_ns=ended,
        parent=parent,
        attributes={semconv.EPD_TRANSFER_BYTES: 4096, semconv.EPD_TRANSFER_LAYER_NS: [1, 2]},
        error_type="ABORTED",
    )
    telemetry.tracer_provider.force_flush()
    (trace_id,) = store.trace_ids()
    by_name = {found.name: found for found in store.spans(trace_id)}
    push = by_name["kv_push"]
    assert push.parent_id == by_name["root"].span_id
    assert push.duration_ns == 5 * MS
    assert abs(push.end_ns - time.time_ns()) < 60_000 * MS
    assert push.attributes["epd.transfer.layer_ns"] == [1, 2]
    assert (push.failed, push.attributes["error.type"]) == (True, "ABORTED")
    assert (push.service, push.instance) == ("epd-prefill", "i-1")


async def test_a_stage_of_an_unsampled_request_is_not_exported(exporting):
    telemetry, store = exporting
    context = trace.SpanContext(1, 2, is_remote=True, trace_flags=trace.TraceFlags(0))
    record_stage(
        telemetry.tracer,
        "encode",
        start_ns=0,
        end_ns=1,
        parent=trace.set_span_in_context(trace.NonRecordingSpan(context)),
    )
    await asyncio.to_thread(telemetry.tracer_provider.force_flush)
    assert store.trace_ids() == []


def test_a_store_keeps_the_newest_traces_and_counts_what_it_drops():
    store = SpanStore(max_traces=2, max_spans=3)
    for trace_id in ("a", "b", "c"):
        one = span("x", 0, 1)
        store.add([ReceivedSpan(**{**vars(one), "trace_id": trace_id})] * 4)
    assert store.trace_ids() == ["b", "c"]
    assert len(store.spans("c")) == 3
    assert store.dropped == 3 + 3  # one too many per trace, and the three of "a"
    assert store.spans("a") == []


def test_a_folder_gives_back_what_it_was_given_and_keeps_the_newest(tmp_path):
    folder = TraceFolder(tmp_path / "traces", max_traces=2)
    assert folder.trace_ids() == []
    kept = span("x", 5, 6, **{"epd.transfer.layer_ns": [1, 2], "ok": True})
    for trace_id in ("a", "b", "c"):
        folder.add([ReceivedSpan(**{**vars(kept), "trace_id": trace_id})])
        time.sleep(0.01)
    assert folder.trace_ids() == ["b", "c"]
    folder.add([ReceivedSpan(**{**vars(span("earlier", 1, 2)), "trace_id": "c"})])
    assert [found.name for found in folder.spans("c")] == ["earlier", "x"]
    assert folder.spans("c")[1] == ReceivedSpan(**{**vars(kept), "trace_id": "c"})
    assert folder.spans("../../etc/passwd") == []


def test_a_taken_port_is_told():
    with OtlpReceiver(SpanStore()) as receiver:
        port = int(receiver.endpoint.rpartition(":")[2])
        with pytest.raises(ConfigError, match=f"cannot receive traces on 127.0.0.1:{port}"):
            OtlpReceiver(SpanStore(), port=port)


def test_the_waterfall_indents_children_and_places_bars_on_one_axis():
    spans = [
        span("epd.v1.RouterService/Generate", 0, 100, span_id="1"),
        span("prefill", 50, 100, span_id="2", parent_id="1", service="epd-prefill"),
        span("decode", 0, 1, span_id="3", parent_id="2", service="epd-decode"),
    ]
    lines = drawn(spans).splitlines()
    assert "3 spans, 3 services, 100.0 ms" in lines[0]
    root, prefill, decode = lines[2:5]
    assert root.startswith("RouterService/Generate ")
    assert prefill.startswith("  prefill ")
    assert decode.startswith("    decode ")
    assert root.count("█") == BAR_WIDTH
    assert prefill.count("█") == BAR_WIDTH // 2
    assert decode.count("█") == 1
    assert prefill.index("█") - root.index("█") == BAR_WIDTH // 2
    assert "50.00" in prefill


def test_the_waterfall_tells_hidden_from_exposed_push_time():
    push = span(
        "kv_push",
        0,
        100,
        **{
            semconv.EPD_TRANSFER_BYTES: 2048,
            semconv.EPD_TRANSFER_EXPOSED_NS: 25 * MS,
            semconv.EPD_TRANSFER_HIDDEN_NS: 75 * MS,
        },
    )
    (line,) = [line for line in drawn([push]).splitlines() if line.startswith("kv_push")]
    assert line.count("░") == BAR_WIDTH * 3 // 4
    assert line.count("█") == BAR_WIDTH // 4
    assert "2 KiB, exposed 25.00 ms, hidden 75.00 ms" in line


def test_the_waterfall_shows_spans_whose_parent_is_missing_and_the_critical_path():
    text = drawn(
        [
            span("orphan", 0, 1, parent_id="gone"),
            span("chat", 0, 2, **{"epd.stage_ns.encode": 3 * MS, "epd.stage_ns.prefill": MS}),
        ]
    )
    assert "\norphan" in text
    assert "critical path: encode 3.00 ms, prefill 1.00 ms" in text
    assert "no spans" in drawn([])


def test_the_waterfall_fits_a_narrow_terminal():
    spans = [
        span("epd.v1.RouterService/Generate", 0, 100, span_id="1"),
        span(
            "kv_push",
            50,
            100,
            parent_id="1",
            **{semconv.EPD_TRANSFER_BYTES: 4096, semconv.EPD_TRANSFER_TRANSPORT: "long" * 8},
        ),
    ]
    lines = drawn(spans, width=80).splitlines()
    assert max(map(len, lines)) <= 80
    assert "RouterService/Generate" in lines[2]
    assert "100.00" in lines[2]
    assert lines[-1] == "kv_push: 4 KiB, " + "long" * 8
