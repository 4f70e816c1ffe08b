"""The metrics say what was done."""

import asyncio

import pytest

from tests.support.ask import ask, generate_request, greedy
from tests.support.questions import make_questions

pytestmark = pytest.mark.timeout(600)

COUNTED = {
    "router": (
        "gen_ai_server_time_to_first_token_seconds_count",
        "gen_ai_server_time_per_output_token_seconds_count",
        "gen_ai_server_request_duration_seconds_count",
        "epd_disagg_prefill_to_decode_latency_ms_count",
    ),
    "prefill-0": (
        "epd_kv_transfer_duration_seconds_count",
        "epd_disagg_kv_transfer_throughput_gb_s_count",
        "epd_request_queue_duration_seconds_count",
    ),
}
GAUGES = {
    "prefill-0": "epd_disagg_prefill_queue_size",
    "decode-0": "epd_disagg_decode_queue_size",
}


def readings(fleet):
    names = [(process, name) for process, names in COUNTED.items() for name in names]
    names += [
        ("encoder-0", "epd_embedding_cache_query_total"),
        ("encoder-0", "epd_embedding_cache_hit_total"),
        ("encoder-0", "epd_encoder_forward_total"),
        ("prefill-0", "epd_embedding_transfer_duration_seconds_count"),
        ("prefill-0", "epd_prefix_cache_query_total"),
        ("prefill-0", "epd_prefix_cache_hit_total"),
        ("prefill-0", "epd_kv_transfer_failed_total"),
        ("decode-0", "epd_request_preemption_total"),
    ]
    return {(process, name): fleet.scrape(process).total(name) for process, name in names}


async def test_counts_equal_what_was_asked(model, shared_fleets, open_channel):
    fleet = shared_fleets.get(model)
    channel = open_channel(fleet.router_address)
    fleet.idle_level()
    before = readings(fleet)
    questions = make_questions(5, seed=53)
    questions.append(questions[4])  # the same again: four cache hits
    answers = [await ask(channel, generate_request(q, greedy(6))) for q in questions]
    after = before

    def grown(process, name):
        return after[process, name] - before[process, name]

    # An answer ends before its push and its call are counted.
    async with asyncio.timeout(30):
        while any(
            grown(process, name) < len(questions)
            for process, names in COUNTED.items()
            for name in names
        ):
            after = await asyncio.to_thread(readings, fleet)

    for process, names in COUNTED.items():
        for name in names:
            assert grown(process, name) == len(questions), name
    images = sum(len(question.images) for question in questions)
    assert grown("encoder-0", "epd_embedding_cache_query_total") == images
    assert grown("encoder-0", "epd_embedding_cache_hit_total") == len(questions[4].images)
    assert grown("encoder-0", "epd_encoder_forward_total") == images - len(questions[4].images)
    with_images = sum(bool(question.images) for question in questions)
    assert grown("prefill-0", "epd_embedding_transfer_duration_seconds_count") == with_images
    usages = [answer.completion.usage for answer in answers]
    assert grown("prefill-0", "epd_prefix_cache_query_total") == sum(
        usage.prompt_tokens for usage in usages
    )
    assert grown("prefill-0", "epd_prefix_cache_hit_total") == sum(
        usage.cached_tokens for usage in usages
    )
    assert grown("prefill-0", "epd_kv_transfer_failed_total") == 0
    assert grown("decode-0", "epd_request_preemption_total") == 0


async def test_blocks_in_use_and_running_requests_show_while_they_run(
    model, shared_fleets, open_channel
):
    fleet = shared_fleets.get(model)
    idle = fleet.idle_level()
    channel = open_channel(fleet.router_address)
    (question,) = make_questions(1, seed=59)
    running = asyncio.create_task(ask(channel, generate_request(question, greedy(3000))))
    used = free = limit = 0.0
    async with asyncio.timeout(60):
        # Blocks are taken while the text is written: not every one tells a single moment.
        while used < 2 or free + used != limit:
            assert not running.done(), f"{free} free, {used} in use, {limit} at most"
            scraped = await asyncio.to_thread(fleet.scrape, "decode-0")
            if scraped.total("epd_request_running"):
                used, free, limit = (
                    scraped.total(f"epd_kv_cache_block_{name}")
                    for name in ("usage", "free", "limit")
                )
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
    fleet.assert_back_to_idle(idle)


async def test_the_four_disaggregation_metrics_are_in_the_text_under_their_exact_names(
    model, shared_fleets, open_channel
):
    fleet = shared_fleets.get(model)
    channel = open_channel(fleet.router_address)
    await ask(channel, generate_request(make_questions(1, seed=61)[0], greedy(4)))
    text = {name: fleet.scrape(name).text for name in ("router", "prefill-0", "decode-0")}
    assert "\nepd_disagg_prefill_to_decode_latency_ms_bucket" in text["router"]
    assert "\nepd_disagg_kv_transfer_throughput_gb_s_bucket" in text["prefill-0"]
    for process, name in GAUGES.items():
        assert f"\n{name} 0" in text[process]
