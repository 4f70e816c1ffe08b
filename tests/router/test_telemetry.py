"""One trace per request with the GenAI span in it, honest timings, metrics of what was done."""

import asyncio
import time
from pathlib import Path

import pytest
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from epd.errors import InvalidRequestError, UnavailableError
from epd.telemetry.prometheus import scrape
from services.router.critical_path import CriticalPath
from tests.router.conftest import Fleet
from tests.router.harness import RunningRouter, eventually, failure, request, router, running
from tests.support.answer import collect

SERVER = "epd.v1.RouterService/Generate"


def record(served: RunningRouter) -> InMemorySpanExporter:
    exporter = InMemorySpanExporter()
    served.telemetry.tracer_provider.add_span_processor(SimpleSpanProcessor(exporter))
    return exporter


async def spans_by_name(exporter: InMemorySpanExporter, *wanted: str) -> dict[str, ReadableSpan]:
    """The spans that have ended, as soon as the wanted ones and the server's are among them."""
    spans: dict[str, ReadableSpan] = {}

    def complete() -> bool:
        spans.update({span.name: span for span in exporter.get_finished_spans()})
        return spans.keys() >= {SERVER, *wanted}

    await eventually(complete)
    return spans


async def test_the_genai_span_is_between_the_server_span_and_the_calls(
    model: Path, fleet: Fleet
) -> None:
    async with running(*fleet.workers), router(model, fleet.workers, model_name="m") as served:
        exporter = record(served)
        message = request("secret question", [b"i"], seed=7, stop=["zzz"])
        answer = await collect(served.stub.Generate(message))
        names = [
            "epd.v1.EncoderService/Encode",
            "epd.v1.PrefillService/Prefill",
            "epd.v1.DecodeService/Decode",
        ]
        spans = await spans_by_name(exporter, "chat m", *names)
    chat = spans["chat m"]
    assert chat.parent is not None
    assert chat.parent.span_id == spans[SERVER].context.span_id
    for name in names:
        child = spans[name]
        assert child.parent is not None
        assert child.parent.span_id == chat.context.span_id
        assert (child.attributes or {})["rpc.response.status_code"] == "OK"
    assert len({span.context.trace_id for span in spans.values()}) == 1
    attributes = dict(chat.attributes or {})
    expected = {
        "gen_ai.operation.name": "chat",
        "gen_ai.provider.name": "epd",
        "gen_ai.request.model": "m",
        "gen_ai.request.max_tokens": 8,
        "gen_ai.request.seed": 7,
        "gen_ai.request.stop_sequences": ("zzz",),
        "gen_ai.response.id": answer.completion.request_id,
        "gen_ai.response.finish_reasons": ("length",),
        "gen_ai.usage.input_tokens": answer.completion.usage.prompt_tokens,
        "gen_ai.usage.output_tokens": 8,
        "epd.outcome": "ok",
        "epd.attempt": 1,
    }
    assert {key: attributes.get(key) for key in expected} == expected
    assert [event.name for event in chat.events] == ["first_token"]
    assert not any("secret" in str(value) for value in attributes.values())


@pytest.mark.parametrize("end", ["error", "cancel"])
async def test_the_genai_span_tells_how_a_request_failed(
    model: Path, fleet: Fleet, end: str
) -> None:
    async with running(*fleet.workers), router(model, fleet.workers, model_name="m") as served:
        exporter = record(served)
        if end == "error":
            fleet.prefill.failures = [InvalidRequestError("no", field="x")]
            await failure(served.stub.Generate(request()))
        else:
            fleet.prefill.prefill_s = 30
            call = served.stub.Generate(request())
            await eventually(lambda: fleet.prefill.open_calls == 1)
            call.cancel()
        spans = await spans_by_name(exporter)
    attributes = dict(spans["chat m"].attributes or {})
    wanted = {"error": ("INVALID_ARGUMENT", "error"), "cancel": ("CANCELLED", "cancelled")}[end]
    assert (attributes["error.type"], attributes["epd.outcome"]) == wanted


async def test_metrics_count_what_was_done(model: Path, fleet: Fleet) -> None:
    async with (
        running(*fleet.workers),
        router(model, fleet.workers, metrics_port="0", model_name="m") as served,
    ):
        for _ in range(3):
            await collect(served.stub.Generate(request("hi", [b"i"])))
        fleet.prefill.failures = [UnavailableError("once")]
        await collect(served.stub.Generate(request(max_tokens=1)))
        fleet.prefill.failures = [InvalidRequestError("no", field="x")]
        await failure(served.stub.Generate(request()))
        found = await asyncio.to_thread(scrape, served.telemetry.metrics_address)
    duration = "gen_ai_server_request_duration_seconds_count"
    assert found.total(duration, gen_ai_request_model="m") == 5
    assert found.total(duration, error_type="INVALID_ARGUMENT") == 1
    assert found.total("gen_ai_server_time_to_first_token_seconds_count") == 4
    assert found.total("gen_ai_server_time_per_output_token_seconds_count") == 3
    assert found.total("epd_request_retry_total") == 1
    assert found.total("epd_route_affinity_hit_total") == 3


async def test_stages_do_not_overlap_and_the_rest_is_told(model: Path, fleet: Fleet) -> None:
    fleet.prefill.prefill_s = 0.05
    fleet.decode.token_s = 0.01
    async with running(*fleet.workers), router(model, fleet.workers) as served:
        answer = await collect(served.stub.Generate(request("hi", [b"i"])))
    stages = {timing.stage: timing.duration_ns for timing in answer.completion.timings}
    assert next(iter(stages)) == "router.preprocess"
    expected = {"encoder.encode", "router.dispatch", "prefill.prefill", "kv_handover"}
    assert expected | {"router.finish"} <= set(stages)
    assert list(stages)[-1] == "unattributed"
    # The fake reports 1 µs of the 50 ms that prefill takes: nobody may claim the difference.
    assert stages["prefill.prefill"] == 1000
    assert stages["unattributed"] > 49_000_000
    assert stages["decode.decode"] > 60_000_000
    assert answer.completion.ttft_ns > 50_000_000


async def test_what_a_window_is_longer_than_the_workers_account_is_rpc(
    model: Path, fleet: Fleet
) -> None:
    fleet.prefill.prefill_s = 0.05
    fleet.prefill.service_ns = 5_000_000
    async with running(*fleet.workers), router(model, fleet.workers) as served:
        answer = await collect(served.stub.Generate(request("hi", [b"i"])))
    stages = {timing.stage: timing.duration_ns for timing in answer.completion.timings}
    assert stages["prefill.rpc"] > 44_000_000
    # 1 µs of the 5 ms is a stage of its own.
    assert stages["unattributed"] > 4_900_000


async def test_a_late_word_of_its_start_makes_no_hand_over_of_what_was_decoding(
    model: Path, fleet: Fleet
) -> None:
    fleet.decode.token_s = 0.02
    fleet.decode.started_late = True
    async with running(*fleet.workers), router(model, fleet.workers) as served:
        answer = await collect(served.stub.Generate(request("hi")))
    stages = {timing.stage: timing.duration_ns for timing in answer.completion.timings}
    # Seven tokens, 20 ms apart, all before Started.
    assert stages["decode.decode"] > 100_000_000


def test_what_follows_the_workers_last_word_is_the_routers_own_stage() -> None:
    path = CriticalPath()
    path.begin_attempt()
    path.answered(time.monotonic_ns())
    path.attempt_failed()
    assert "router.finish" not in path.stages_ns()
    path.begin_attempt()
    time.sleep(0.02)
    path.answered(time.monotonic_ns())
    time.sleep(0.02)
    stages = path.stages_ns()
    assert stages["router.finish"] > 19_000_000
    assert stages["unattributed"] > 19_000_000  # before the answer, where nobody has told a stage
    path.begin_attempt()  # it was preempted and goes on elsewhere
    assert "router.finish" not in path.stages_ns()


async def test_time_lost_on_failed_attempts_is_a_stage_of_its_own(
    model: Path, fleet: Fleet
) -> None:
    fleet.prefill.prefill_s = 0.05
    fleet.prefill.late_failures = [UnavailableError("once")]
    async with running(*fleet.workers), router(model, fleet.workers) as served:
        answer = await collect(served.stub.Generate(request("hi", [b"i"])))
    stages = {timing.stage: timing.duration_ns for timing in answer.completion.timings}
    assert stages["router.earlier_attempts"] > 49_000_000
    # The image was encoded twice; the first time is part of the time lost.
    assert stages["encoder.encode"] == stages["prefill.prefill"] == 1000
