"""In auto mode a real unified decode worker prefills while it is idle, and is spared while busy."""

import asyncio
import secrets
import time
from collections.abc import Mapping
from dataclasses import dataclass

import pytest

from epd.telemetry import semconv
from services.router.disaggregation import MARGIN
from tests.support.ask import ask, generate_request, greedy
from tests.support.reference import Question

#: So short that by the first guesses of all speeds a hand-over does not pay.
QUESTION = Question((), "?")
TOKENS = 16
#: Answers that run meanwhile: a prompt computed between their steps holds each of them up.
RUNNING = 16
#: Of each of them: far more than are drawn before the test is done.
LONG = 4000
#: What a busy machine has measured may delay a way.
ATTEMPTS = 20
WITHIN_S = 30.0


@dataclass(frozen=True)
class Asked:
    """A request that was answered right, and what the counters tell of it."""

    trace_id: str
    way: str
    costs: Mapping[str, float]


@pytest.fixture
def fleet(model, shared_fleets):
    return shared_fleets.get(
        model,
        flags={"router": ["--disaggregation-mode=auto"]},
        worker_flags={"decode-0": ["--unified=true"]},
    )


async def test_either_way_is_taken_told_with_both_costs_and_gives_the_same_answer(
    fleet, open_channel, reference
):
    idle = fleet.idle_level()
    channel = open_channel(fleet.router_address)
    expected = reference.greedy(QUESTION, TOKENS)

    asked = await provoke("local", fleet, channel, expected)
    async with asyncio.TaskGroup() as group:
        others = []
        for _ in range(RUNNING):  # one by one: no prompt waits for another
            request = generate_request(QUESTION, greedy(LONG))
            others.append(group.create_task(ask(channel, request)))
            await in_batch(fleet, len(others))
        asked += await provoke("remote", fleet, channel, expected)
        assert not any(other.done() for other in others)
        for other in others:
            other.cancel()
    for one in asked:
        await assert_told(one, fleet)
    fleet.assert_back_to_idle(idle, within_s=WITHIN_S)


async def provoke(way, fleet, channel, expected):
    """Asks until a request goes this way; returns all it has asked."""
    asked: list[Asked] = []
    while not asked or asked[-1].way != way:
        assert len(asked) < ATTEMPTS, asked
        asked.append(await ask_once(fleet, channel, expected))
    return asked


async def ask_once(fleet, channel, expected):
    """Asks and checks the answer; nothing else is decided meanwhile."""
    before = fleet.scrape("router")
    trace_id = secrets.token_hex(16)
    answer = await ask(
        channel,
        generate_request(QUESTION, greedy(TOKENS)),
        metadata={"traceparent": f"00-{trace_id}-b7ad6b7169203331-01"},
    )
    after = fleet.scrape("router")
    taken = growth(before, after, "epd_route_decision_total")
    assert answer.token_ids == expected, taken
    assert answer.completion.attempt_count == 1
    assert sorted(taken.values()) == [0, 1], taken
    costs = growth(before, after, "epd_route_predicted_cost_seconds_total")
    return Asked(trace_id, max(taken, key=taken.get), costs)


async def assert_told(asked, fleet):
    """The request's span tells the same as the counters, and the way is the cheaper one or near."""
    (span,) = await spans(fleet, asked.trace_id, "chat ")
    assert span.attributes[semconv.EPD_ROUTE_WAY] == asked.way
    assert asked.costs == pytest.approx(
        {
            "local": span.attributes[semconv.EPD_ROUTE_COST_LOCAL_S],
            "remote": span.attributes[semconv.EPD_ROUTE_COST_REMOTE_S],
        }
    )
    if not span.attributes[semconv.EPD_ROUTE_EXPLORED]:
        assert 0 < asked.costs[asked.way] * (1 - MARGIN) <= min(asked.costs.values()) * 1.001
    if asked.way == "remote":
        assert await spans(fleet, asked.trace_id, "epd.v1.PrefillService/Prefill")
    else:
        assert not any(span.service == "epd-prefill" for span in fleet.spans.spans(asked.trace_id))


def growth(before, after, metric):
    """By way."""
    return {
        way: after.total(metric, way=way) - before.total(metric, way=way)
        for way in ("local", "remote")
    }


async def in_batch(fleet, count):
    """Returns once so many answers run on the decode worker."""
    deadline = time.monotonic() + WITHIN_S
    while (running := fleet.scrape("decode-0").total("epd_request_running")) < count:
        assert time.monotonic() < deadline, f"{running} of {count} run"
        await asyncio.sleep(0.02)


async def spans(fleet, trace_id, name):
    """The spans of a trace whose name begins so, which arrive some time after the answer."""
    deadline = time.monotonic() + WITHIN_S
    while True:
        trace = fleet.spans.spans(trace_id)
        if found := [span for span in trace if span.name.startswith(name)]:
            return found
        assert time.monotonic() < deadline, f"no {name} among {trace}"
        await asyncio.sleep(0.05)
