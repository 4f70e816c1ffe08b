"""One request through four processes: its trace, and metrics that equal what was done."""

import asyncio
import secrets
from pathlib import Path

import pytest

from epd.rpc.channels import open_channel
from epd.rpc.options import IMAGE_MESSAGE_BYTES
from epd.v1 import worker_pb2, worker_pb2_grpc
from tests.support.ask import ask, generate_request, greedy
from tests.support.reference import Question

SAMPLE = Path(__file__).parents[2] / "epd" / "cli" / "sample.png"

#: (name, service) of parent and child. The trace holds nothing but these edges and upkeep of
#: leases inside the prefill span.
EDGES = {
    (("client", "client"), ("epd.v1.RouterService/Generate", "epd-router")),
    (("epd.v1.RouterService/Generate", "epd-router"), ("chat", "epd-router")),
    (("chat", "epd-router"), ("epd.v1.EncoderService/Encode", "epd-router")),
    (
        ("epd.v1.EncoderService/Encode", "epd-router"),
        ("epd.v1.EncoderService/Encode", "epd-encoder"),
    ),
    (("epd.v1.EncoderService/Encode", "epd-encoder"), ("preprocess", "epd-encoder")),
    (("epd.v1.EncoderService/Encode", "epd-encoder"), ("encode", "epd-encoder")),
    (("chat", "epd-router"), ("epd.v1.PrefillService/Prefill", "epd-router")),
    (
        ("epd.v1.PrefillService/Prefill", "epd-router"),
        ("epd.v1.PrefillService/Prefill", "epd-prefill"),
    ),
    (
        ("epd.v1.PrefillService/Prefill", "epd-prefill"),
        ("epd.v1.DecodeService/Reserve", "epd-prefill"),
    ),
    (
        ("epd.v1.DecodeService/Reserve", "epd-prefill"),
        ("epd.v1.DecodeService/Reserve", "epd-decode"),
    ),
    (("epd.v1.PrefillService/Prefill", "epd-prefill"), ("embedding_read", "epd-prefill")),
    (("epd.v1.PrefillService/Prefill", "epd-prefill"), ("queue", "epd-prefill")),
    (("epd.v1.PrefillService/Prefill", "epd-prefill"), ("prefill", "epd-prefill")),
    (("epd.v1.PrefillService/Prefill", "epd-prefill"), ("kv_push", "epd-prefill")),
    (("chat", "epd-router"), ("epd.v1.DecodeService/Decode", "epd-router")),
    (
        ("epd.v1.DecodeService/Decode", "epd-router"),
        ("epd.v1.DecodeService/Decode", "epd-decode"),
    ),
    (("epd.v1.DecodeService/Decode", "epd-decode"), ("kv_wait", "epd-decode")),
    (("epd.v1.DecodeService/Decode", "epd-decode"), ("decode", "epd-decode")),
}


@pytest.fixture
def fleet(shared_fleets, tiny_model):
    return shared_fleets.get(tiny_model)


def question(text="describe the image."):
    # A text of its own per test: no prefix cache changes what is counted.
    return Question(images=(SAMPLE.read_bytes(),), text=f"{text} {secrets.token_hex(8)}")


async def answer(fleet, asked, *, max_tokens=8, flags="01"):
    """The answer, the id of its trace and the id of the client's span."""
    trace_id, span_id = secrets.token_hex(16), secrets.token_hex(8)
    async with open_channel(fleet.router_address, message_bytes=IMAGE_MESSAGE_BYTES) as channel:
        found = await ask(
            channel,
            generate_request(asked, greedy(max_tokens)),
            metadata={"traceparent": f"00-{trace_id}-{span_id}-{flags}"},
        )
    return found, trace_id, span_id


def named(span):
    """A span's name without the model, and its service."""
    return ("chat" if span.name.startswith("chat ") else span.name, span.service)


async def test_a_request_is_one_trace_with_every_parent_right(fleet):
    before = set(fleet.spans.trace_ids())
    _, trace_id, client_span_id = await answer(fleet, question())
    spans = await asyncio.to_thread(fleet.trace, trace_id, count=len(EDGES))
    by_id = {span.span_id: named(span) for span in spans} | {client_span_id: ("client", "client")}
    edges = {(by_id[span.parent_id], named(span)) for span in spans}
    assert edges >= EDGES
    upkeep = {child for _, child in edges - EDGES}
    assert all(name.endswith(("/Renew", "/Release", "/Settle", "queue")) for name, _ in upkeep)
    assert {span.service for span in spans} == {
        "epd-router",
        "epd-encoder",
        "epd-prefill",
        "epd-decode",
    }
    assert not any(span.failed for span in spans)
    assert set(fleet.spans.trace_ids()) - before == {trace_id}, "a second root"


async def test_the_spans_tell_what_was_moved_and_what_of_it_was_hidden(fleet):
    _, trace_id, _ = await answer(fleet, question())
    spans = await asyncio.to_thread(fleet.trace, trace_id, count=len(EDGES))
    by_name = {named(span)[0]: span for span in spans}
    push = by_name["kv_push"].attributes
    assert push["epd.transfer.bytes"] > 0
    assert push["epd.transfer.descriptors"] >= 3, "one per layer at least"
    assert push["epd.transfer.transport"] == "nixl"
    assert push["epd.transfer.exposed_ns"] >= 0
    assert push["epd.transfer.hidden_ns"] >= 0
    genai = by_name["chat"].attributes
    assert genai["gen_ai.operation.name"] == "chat"
    assert genai["gen_ai.provider.name"] == "epd"
    assert genai["gen_ai.usage.output_tokens"] == 8
    assert genai["gen_ai.response.finish_reasons"] == ["length"]
    assert "gen_ai.input.messages" not in genai


async def test_an_unsampled_request_is_exported_by_no_service(fleet):
    before = fleet.spans.trace_ids()
    found, trace_id, _ = await answer(fleet, question(), flags="00")
    assert len(found.token_ids) == 8
    sampled = (await answer(fleet, question()))[1]
    await asyncio.to_thread(fleet.trace, sampled, count=len(EDGES))
    assert trace_id not in fleet.spans.trace_ids()
    assert set(fleet.spans.trace_ids()) - set(before) == {sampled}


async def test_the_metrics_equal_what_was_done(fleet):
    names = list(fleet.processes)
    before = {name: await asyncio.to_thread(fleet.scrape, name) for name in names}
    asked = [question(), question(), question()]
    prompts = []
    for one in asked:
        found, _, _ = await answer(fleet, one, max_tokens=5)
        prompts.append(found.completion.usage)
    after = {name: await asyncio.to_thread(fleet.scrape, name) for name in names}

    def grown(name, metric, **labels):
        return after[name].total(metric, **labels) - before[name].total(metric, **labels)

    assert grown("router", "gen_ai_server_request_duration_seconds_count") == 3
    assert grown("router", "gen_ai_server_time_to_first_token_seconds_count") == 3
    assert grown("router", "gen_ai_server_time_per_output_token_seconds_count") == 3
    method = {"rpc_method": "epd.v1.PrefillService/Prefill"}
    assert grown("prefill-0", "rpc_server_call_duration_seconds_count", **method) == 3
    assert grown("encoder-0", "epd_embedding_cache_query_total") == 3
    assert grown("encoder-0", "epd_embedding_cache_hit_total") >= 2, "the same picture"
    assert grown("prefill-0", "epd_kv_transfer_failed_total") == 0
    assert grown("prefill-0", "epd_kv_transfer_duration_seconds_count") == 3
    assert grown("prefill-0", "epd_disagg_kv_transfer_throughput_gb_s_count") == 3
    layout = await layout_of(fleet.process("prefill-0").address)
    block_bytes = layout.regions[0].block_stride * layout.layer_count
    blocks = sum(-(-u.prompt_tokens // layout.block_size) for u in prompts)
    cached = sum(u.cached_tokens // layout.block_size for u in prompts)
    moved = grown("prefill-0", "epd_kv_transfer_io_bytes_total")
    assert (blocks - cached) * block_bytes <= moved < blocks * block_bytes + 3 * 1024
    latency = "epd_disagg_prefill_to_decode_latency_ms_count"
    assert sum(grown(name, latency) for name in names) == 3


async def test_the_disaggregation_metrics_and_gauges_are_where_they_belong(fleet):
    await answer(fleet, question())
    texts = {name: (await asyncio.to_thread(fleet.scrape, name)).text for name in fleet.processes}
    assert "\nepd_disagg_prefill_queue_size" in texts["prefill-0"]
    assert "\nepd_disagg_decode_queue_size" in texts["decode-0"]
    for name in ("prefill-0", "decode-0"):
        for gauge in ("usage", "free", "quarantined", "limit"):
            assert f"\nepd_kv_cache_block_{gauge}" in texts[name]
        for gauge in ("epd_request_running", "epd_request_waiting"):
            assert f"\n{gauge}" in texts[name]
        for total in ("hit", "query"):
            assert f"\nepd_prefix_cache_{total}_total" in texts[name]
    for gauge in ("usage", "free", "quarantined", "limit"):
        assert f"\nepd_embedding_cache_memory_{gauge}_bytes" in texts["encoder-0"]


async def layout_of(address):
    async with open_channel(address) as channel:
        stub = worker_pb2_grpc.WorkerServiceStub(channel)
        return (await stub.GetInfo(worker_pb2.GetInfoRequest(), timeout=5)).kv_layout
