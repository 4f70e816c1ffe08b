"""Metric names as they are scraped, and what is behind them."""

import re

import pytest

from epd.telemetry import semconv
from epd.telemetry.genai_metrics import GenAiMetrics
from epd.telemetry.metrics import METRICS, counter, histogram, observe
from epd.telemetry.prometheus import parse, scrape
from epd.telemetry.setup import start_telemetry
from epd.telemetry.transfer_metrics import EmbeddingTransferMetrics, KvTransferMetrics


@pytest.fixture
def telemetry():
    started = start_telemetry("prefill", "i-1", metrics_port=0)
    yield started
    started.close()


def read(telemetry):
    return scrape(telemetry.metrics_address)


def test_every_metric_can_be_made_and_carries_its_name_into_the_text(telemetry):
    for name, spec in METRICS.items():
        if spec.kind == "histogram":
            histogram(telemetry.meter, name).record(1)
        elif spec.kind == "counter":
            counter(telemetry.meter, name).add(1)
        else:
            observe(telemetry.meter, {name: lambda: 1})
    families = set(re.findall(r"^# TYPE (\S+)", read(telemetry).text, re.MULTILINE))
    for name in METRICS:
        assert any(family.startswith(name.replace(".", "_")) for family in families), name


def test_the_disaggregation_metrics_have_exactly_their_names(telemetry):
    observe(
        telemetry.meter,
        {
            semconv.DISAGG_PREFILL_QUEUE_SIZE: lambda: 3,
            semconv.DISAGG_DECODE_QUEUE_SIZE: lambda: 4,
        },
    )
    histogram(telemetry.meter, semconv.DISAGG_PREFILL_TO_DECODE_LATENCY_MS).record(5)
    KvTransferMetrics(telemetry.meter).record(byte_count=2_000_000, transfer_ns=1_000_000)
    scraped = read(telemetry)
    assert scraped.total("epd_disagg_prefill_queue_size") == 3
    assert scraped.total("epd_disagg_decode_queue_size") == 4
    assert scraped.total("epd_disagg_prefill_to_decode_latency_ms_count") == 1
    assert scraped.total("epd_disagg_prefill_to_decode_latency_ms_sum") == 5
    assert scraped.total("epd_disagg_kv_transfer_throughput_gb_s_sum") == pytest.approx(2.0)


def test_the_genai_histograms_have_their_names_and_buckets(telemetry):
    metrics = GenAiMetrics(telemetry.meter, "shapes-vl")
    metrics.record_success("chat", duration_s=1.1, first_token_s=0.1, output_tokens=11)
    metrics.record_success("chat", duration_s=0.1, first_token_s=0.1, output_tokens=1)
    metrics.record_failure("chat", duration_s=0.2, error_type="UNAVAILABLE")
    scraped = read(telemetry)
    labels = {
        "gen_ai_operation_name": "chat",
        "gen_ai_provider_name": "epd",
        "gen_ai_request_model": "shapes-vl",
    }
    name = "gen_ai_server_request_duration_seconds_count"
    assert scraped.total(name, **labels) == 3
    assert scraped.total(name, error_type="UNAVAILABLE") == 1
    assert scraped.total("gen_ai_server_time_to_first_token_seconds_count", **labels) == 2
    per_token = "gen_ai_server_time_per_output_token_seconds"
    assert scraped.total(f"{per_token}_count") == 1, "one token has no time per token"
    assert scraped.total(f"{per_token}_sum") == pytest.approx(0.1)
    for metric, bounds in (
        ("time_to_first_token", [*semconv.TIME_TO_FIRST_TOKEN_BUCKETS_S]),
        ("time_per_output_token", [*semconv.TIME_PER_OUTPUT_TOKEN_BUCKETS_S]),
    ):
        found = [
            float(sample["le"])
            for sampled, sample, _ in scraped.samples
            if sampled == f"gen_ai_server_{metric}_seconds_bucket" and "error_type" not in sample
        ]
        assert found == [*bounds, float("inf")]
    assert semconv.REQUEST_DURATION_BUCKETS_S[-1] == pytest.approx(81.92)


def test_failed_transfers_count_apart_and_do_not_touch_the_times(telemetry):
    kv, embeddings = KvTransferMetrics(telemetry.meter), EmbeddingTransferMetrics(telemetry.meter)
    kv.record(100, 2_000_000_000)
    kv.record_failure()
    embeddings.record(50, 1_000_000_000)
    embeddings.record_failure()
    scraped = read(telemetry)
    assert scraped.total("epd_kv_transfer_failed_total") == 1
    assert scraped.total("epd_kv_transfer_duration_seconds_count") == 1
    assert scraped.total("epd_kv_transfer_duration_seconds_sum") == 2
    assert scraped.total("epd_kv_transfer_io_bytes_total") == 100
    assert scraped.total("epd_embedding_transfer_io_bytes_total") == 50
    assert scraped.total("epd_embedding_transfer_failed_total") == 1


def test_gauges_are_read_at_each_scrape(telemetry):
    free = [7]
    observe(telemetry.meter, {semconv.KV_BLOCK_FREE: lambda: free[0]})
    assert read(telemetry).total("epd_kv_cache_block_free") == 7
    free[0] = 5
    assert read(telemetry).total("epd_kv_cache_block_free") == 5


def test_two_services_of_one_process_do_not_share_metrics(telemetry):
    other = start_telemetry("decode", "i-2", metrics_port=0)
    try:
        counter(other.meter, semconv.REQUEST_RETRY).add(1)
        assert "epd_request_retry" not in read(telemetry).text
        assert 'service_instance_id="i-2"' in read(other).text
    finally:
        other.close()


def test_metrics_may_be_off():
    telemetry = start_telemetry("prefill", "i-1")
    assert telemetry.metrics_address == ""
    counter(telemetry.meter, semconv.REQUEST_RETRY).add(1)
    telemetry.close()


def test_standard_variables_name_the_service(monkeypatch):
    monkeypatch.setenv("OTEL_SERVICE_NAME", "mine")
    monkeypatch.setenv("OTEL_RESOURCE_ATTRIBUTES", "deployment.environment.name=test")
    telemetry = start_telemetry("prefill", "i-1", metrics_port=0)
    try:
        counter(telemetry.meter, semconv.REQUEST_RETRY).add(1)
        text = read(telemetry).text
    finally:
        telemetry.close()
    assert 'service_name="mine"' in text
    assert 'service_namespace="epd"' in text
    assert 'deployment_environment_name="test"' in text


def test_totals_add_up_over_labels():
    scraped = parse('a_total{x="1",y="2"} 3\na_total{x="2",y="2"} 4\nb 1\n')
    assert scraped.total("a_total") == 7
    assert scraped.total("a_total", x="2") == 4
    assert scraped.total("missing") == 0


def test_no_name_is_spelt_outside_the_module_of_names():
    """Names in code elsewhere would drift from the documented and tested ones."""
    from pathlib import Path

    root = Path(__file__).parents[2]
    own = {value for key, value in vars(semconv).items() if key.isupper() and "." in str(value)}
    spelt = re.compile(r"""["'](gen_ai\.[a-z._]+|rpc\.[a-z._]+|epd\.[a-z_]+\.[a-z_.]+)["']""")
    for folder in ("epd", "services"):
        for path in (root / folder).rglob("*.py"):
            if path.name == "semconv.py" or "v1" in path.parts:
                continue
            found = [name for name in spelt.findall(path.read_text()) if name in own]
            assert not found, f"{path}: {found}"
