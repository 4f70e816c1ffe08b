"""Several routers before the same workers: they share no state and know nothing of each other."""

import asyncio
import random

import pytest

from epd.v1 import worker_pb2, worker_pb2_grpc
from tests.support.ask import ask, generate_request, greedy
from tests.support.faults import frozen
from tests.support.fleet import fleet_of
from tests.support.reference import Question

pytestmark = pytest.mark.timeout(600)

TOKENS = 24
#: Per router.
CONCURRENCY = 6
METHODS = {"prefill": "epd.v1.PrefillService/Prefill", "decode": "epd.v1.DecodeService/Decode"}
#: What a lost hand-over would leave behind.
LOST = (
    "epd_kv_transfer_failed_total",
    "epd_lease_expired_total",
    "epd_lease_unknown_renewal_total",
)


@pytest.fixture(scope="module")
def fleet(model):
    with fleet_of(model, prefills=2, decodes=2) as running:
        running.add_router("router-1")
        yield running


@pytest.fixture
def channels(fleet, open_channel):
    """One to each router."""
    return [open_channel(router.address) for router in fleet.of_role("router")]


def questions(count):
    """No two begin alike, so that no prefix cache favours a worker; some prompts are longer."""
    words = random.Random(503)
    for number in range(count):
        yield number, Question((), f"{words.getrandbits(64):x} " * words.randint(1, 6))


def served(fleet, role):
    """Of each worker of a role: calls it has ended, and how long they were there, in seconds."""
    scraped = [fleet.scrape(process.name) for process in fleet.of_role(role)]
    series = [f"rpc_server_call_duration_seconds_{part}" for part in ("count", "sum")]
    return [[one.total(name, rpc_method=METHODS[role]) for one in scraped] for name in series]


def grown(now, before):
    return [after - first for after, first in zip(now, before, strict=True)]


async def reported(channel, requests):
    """Waits until a worker reports at least so many requests; returns the number."""
    watch = worker_pb2_grpc.WorkerServiceStub(channel).WatchLoad(worker_pb2.WatchLoadRequest())
    async for load in watch:
        found = load.running_requests + load.waiting_requests
        if found >= requests:
            watch.cancel()
            return found
    raise AssertionError("the reports ended")


async def test_two_routers_give_each_worker_its_share_and_use_no_memory_twice(
    fleet, channels, reference, full_run, note
):
    # The claim is 20 % over many requests; over few, what else the machine does counts as well.
    count, uneven = (4000, 0.2) if full_run else (500, 0.3)
    idle = fleet.idle_level()
    before = {role: served(fleet, role) for role in METHODS}
    waiting = questions(count)
    sampled = []

    async def client(channel):
        for number, question in waiting:
            answer = await ask(channel, generate_request(question, greedy(TOKENS)), timeout_s=120)
            assert len(answer.token_ids) == TOKENS
            if number % (count // 20) == 0:
                sampled.append((question, answer.token_ids))

    async with asyncio.TaskGroup() as group:
        for channel in channels * CONCURRENCY:
            group.create_task(client(channel))
    fleet.assert_back_to_idle(idle)
    for question, tokens in sampled:
        assert tokens == reference.greedy(question, TOKENS)
    for role, (calls_before, seconds_before) in before.items():
        calls_now, seconds_now = served(fleet, role)
        calls, seconds = grown(calls_now, calls_before), grown(seconds_now, seconds_before)
        load = [round(each, 1) for each in seconds]
        note(f"Two routers: {role} workers had {calls} requests, {load} request-seconds")
        assert sum(calls) == count, "sent twice, or not at all"
        assert min(calls) >= (1 - uneven) * count / 2, f"{role} workers had {calls}"
    for process in (*fleet.of_role("prefill"), *fleet.of_role("decode")):
        scraped = fleet.scrape(process.name)
        assert not any(scraped.total(name) for name in LOST), process.name


async def test_what_one_router_has_sent_shows_at_decode_while_its_prompt_is_not_computed_yet(
    fleet, channels, open_channel, reference
):
    """Otherwise the others take that decode worker for idle until the KV has come."""
    decodes = [open_channel(process.address) for process in fleet.of_role("decode")]
    question = Question((), "Shows early.")
    with frozen(fleet, "prefill-0", "prefill-1"):
        task = asyncio.create_task(
            ask(channels[0], generate_request(question, greedy(TOKENS)), timeout_s=120)
        )
        seen = [asyncio.create_task(reported(decode, 1)) for decode in decodes]
        done, others = await asyncio.wait(seen, timeout=8, return_when=asyncio.FIRST_COMPLETED)
        for other in others:
            other.cancel()
    assert [one.result() for one in done] == [1]
    assert (await task).token_ids == reference.greedy(question, TOKENS)
