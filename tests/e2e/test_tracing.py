"""One request is one trace over all four services, and an unsampled one is none."""

import asyncio
import secrets

import pytest

from tests.support.ask import ask, generate_request, greedy
from tests.support.questions import make_questions

pytestmark = pytest.mark.timeout(600)

ENCODE = "epd.v1.EncoderService/Encode"
PREFILL = "epd.v1.PrefillService/Prefill"
DECODE = "epd.v1.DecodeService/Decode"
RESERVE = "epd.v1.DecodeService/Reserve"
GENERATE = "epd.v1.RouterService/Generate"
CLIENT_SPAN = "b7ad6b7169203331"

#: Each span as (service, kind, name) and its parent.
EDGES = {
    (("router", "SERVER", GENERATE), ("client", "", "")),
    (("router", "INTERNAL", "chat"), ("router", "SERVER", GENERATE)),
    (("router", "CLIENT", ENCODE), ("router", "INTERNAL", "chat")),
    (("router", "INTERNAL", "dispatch"), ("router", "INTERNAL", "chat")),
    (("router", "CLIENT", PREFILL), ("router", "INTERNAL", "chat")),
    (("router", "CLIENT", DECODE), ("router", "INTERNAL", "chat")),
    (("encoder", "SERVER", ENCODE), ("router", "CLIENT", ENCODE)),
    (("encoder", "INTERNAL", "preprocess"), ("encoder", "SERVER", ENCODE)),
    (("encoder", "INTERNAL", "encode"), ("encoder", "SERVER", ENCODE)),
    (("prefill", "SERVER", PREFILL), ("router", "CLIENT", PREFILL)),
    (("prefill", "INTERNAL", "queue"), ("prefill", "SERVER", PREFILL)),
    (("prefill", "CLIENT", RESERVE), ("prefill", "SERVER", PREFILL)),
    (("prefill", "INTERNAL", "embedding_read"), ("prefill", "SERVER", PREFILL)),
    (("prefill", "INTERNAL", "prefill"), ("prefill", "SERVER", PREFILL)),
    (("prefill", "INTERNAL", "kv_push"), ("prefill", "SERVER", PREFILL)),
    (("decode", "SERVER", RESERVE), ("prefill", "CLIENT", RESERVE)),
    (("decode", "SERVER", DECODE), ("router", "CLIENT", DECODE)),
    (("decode", "INTERNAL", "kv_wait"), ("decode", "SERVER", DECODE)),
    (("decode", "INTERNAL", "queue"), ("decode", "SERVER", DECODE)),
    (("decode", "INTERNAL", "decode"), ("decode", "SERVER", DECODE)),
}


def label(span):
    """Service, kind and name, without the model's name."""
    return span.service.removeprefix("epd-"), span.kind, span.name.split(" ")[0]


async def traced(channel, question, flags, **options):
    """Asks with a fresh trace context; returns the trace id and the answer."""
    trace_id = secrets.token_hex(16)
    metadata = {"traceparent": f"00-{trace_id}-{CLIENT_SPAN}-{flags}"}
    request = generate_request(question, greedy(8))
    return trace_id, await ask(channel, request, metadata=metadata, **options)


async def test_an_image_request_is_one_trace_with_exactly_these_edges(
    model, shared_fleets, open_channel
):
    fleet = shared_fleets.get(model)
    channel = open_channel(fleet.router_address)
    (question,) = make_questions(3, seed=41)[1:2]
    trace_id, _ = await traced(channel, question, "01")
    spans = fleet.trace(trace_id, count=len(EDGES))
    by_id = {span.span_id: span for span in spans}
    edges = set()
    for span in spans:
        parent = by_id.get(span.parent_id)
        if parent is None:
            assert span.parent_id == CLIENT_SPAN, f"second root: {span}"
        edges.add((label(span), label(parent) if parent else ("client", "", "")))
    assert edges == EDGES
    assert not any(span.failed for span in spans)
    assert len({span.instance for span in spans}) == 4


async def test_stages_leave_little_of_a_request_with_images_unattributed(
    model, shared_fleets, open_channel
):
    fleet = shared_fleets.get(model)
    channel = open_channel(fleet.router_address)
    (question,) = make_questions(3, seed=587)[2:]  # two images
    shares = []
    for _ in range(50):  # on a machine that is busy elsewhere anything may take long once
        answer = await ask(channel, generate_request(question, greedy(8)))
        stages = {timing.stage: timing.duration_ns for timing in answer.completion.timings}
        rest = stages["unattributed"]
        if rest < max(2_000_000, sum(stages.values()) // 100):
            break
        shares.append(stages)
    else:
        pytest.fail(f"never below 2 ms and 1 %: {shares[-1]}")


async def test_the_push_tells_its_bytes_its_writes_and_what_was_hidden(
    model, shared_fleets, open_channel
):
    fleet = shared_fleets.get(model)
    channel = open_channel(fleet.router_address)
    (question,) = make_questions(4, seed=43)[3:4]  # long: several chunks
    trace_id, answer = await traced(channel, question, "01")
    (push,) = [s for s in fleet.trace(trace_id, count=len(EDGES)) if s.name == "kv_push"]
    chunks = -(-answer.completion.usage.prompt_tokens // 512)
    layers = 3
    attributes = push.attributes
    # Layers that wait for a busy transfer thread leave as one WRITE, and the seal with the last.
    assert 1 <= attributes["epd.transfer.writes"] <= layers * chunks + 1
    assert attributes["epd.transfer.bytes"] > 1024 * 1024
    assert attributes["epd.transfer.transport"] == "nixl"
    assert len(attributes["epd.transfer.layer_ns"]) == layers
    # All chunks but the last are pushed behind the next one's forward pass.
    assert attributes["epd.transfer.hidden_ns"] > 0
    assert 0 < attributes["epd.transfer.exposed_ns"] <= push.duration_ns


async def test_a_request_without_the_sampled_flag_is_exported_nowhere(
    model, shared_fleets, open_channel
):
    fleet = shared_fleets.get(model)
    channel = open_channel(fleet.router_address)
    (question,) = make_questions(2, seed=47)[1:]
    unsampled, _ = await traced(channel, question, "00")
    sampled, _ = await traced(channel, question, "01")
    fleet.trace(sampled, count=len(EDGES) - 2)  # the embedding is cached now
    assert fleet.spans.spans(unsampled) == []


async def test_upkeep_without_a_request_begins_no_trace(model, shared_fleets):
    fleet = shared_fleets.get(model)
    fleet.idle_level()
    known, calm_s = set(fleet.spans.trace_ids()), 0
    while calm_s < 4:  # the last spans of earlier tests
        await asyncio.sleep(1.0)
        before, known = known, set(fleet.spans.trace_ids())
        calm_s = calm_s + 1 if known == before else 0
    await asyncio.sleep(2.0)  # heartbeats, load reports, renewals
    assert set(fleet.spans.trace_ids()) == known
