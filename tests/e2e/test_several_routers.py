"""Several routers before the same workers: they share no state and know nothing of each other."""

import asyncio
import itertools
import random

import pytest

from epd.rpc.request_context import new_id
from epd.v1 import decode_pb2, decode_pb2_grpc, worker_pb2, worker_pb2_grpc
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
    # Nobody is to be taken for gone while he is frozen.
    patient = {"prefill": "--pair-silence-s=60", "decode": "--pair-silence-s=60"}
    patient |= {"router": "--worker-silence-s=60"}
    flags = {role: (flag,) for role, flag in patient.items()}
    with fleet_of(model, prefills=2, decodes=2, flags=flags) as running:
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


async def ended(fleet, role, before, count):
    """What has been served since, once so many calls have ended: some end after their answer."""
    async with asyncio.timeout(60):
        while True:
            calls, seconds = map(grown, served(fleet, role), before)
            if sum(calls) >= count:
                return calls, seconds
            await asyncio.sleep(0.1)


async def asked(channels, waiting):
    """Asks all of these; every 25th question with its answer."""
    sampled = []

    async def client(channel):
        for number, question in waiting:
            answer = await ask(channel, generate_request(question, greedy(TOKENS)))
            assert len(answer.token_ids) == TOKENS
            if number % 25 == 0:
                sampled.append((question, answer.token_ids))

    async with asyncio.TaskGroup() as group:
        for channel in channels * CONCURRENCY:
            group.create_task(client(channel))
    return sampled


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
    # The claim is 20 % over many requests. Over few, what else the machine does counts as well: a
    # worker that is held up gets less once, one that is neglected gets less each time.
    count, uneven, rounds = (4000, 0.2, 1) if full_run else (500, 0.3, 3)
    idle = fleet.idle_level()
    waiting = questions(rounds * count)
    for _ in range(rounds):
        before = {role: served(fleet, role) for role in METHODS}
        for question, tokens in await asked(channels, itertools.islice(waiting, count)):
            assert tokens == reference.greedy(question, TOKENS)
        fleet.assert_back_to_idle(idle)
        shares = {}
        for role in METHODS:
            calls, seconds = await ended(fleet, role, before[role], count)
            load = [round(each, 1) for each in seconds]
            note(f"Two routers: {role} workers had {calls} requests, {load} request-seconds")
            assert sum(calls) == count, "sent twice, or not at all"
            shares[role] = calls
        if all(min(calls) >= (1 - uneven) * count / 2 for calls in shares.values()):
            break
    else:
        pytest.fail(f"workers had {shares}")
    for process in (*fleet.of_role("prefill"), *fleet.of_role("decode")):
        scraped = fleet.scrape(process.name)
        assert not any(scraped.total(name) for name in LOST), process.name


async def test_a_router_stays_away_from_a_worker_that_others_keep_busy(
    fleet, channels, open_channel
):
    """What it has sent itself tells nothing here: it has one request at a time."""
    idle = fleet.idle_level()
    decode = open_channel(fleet.processes["decode-0"].address)
    stub = decode_pb2_grpc.DecodeServiceStub(decode)
    waiting = questions(100)
    for _ in range(5):
        # Whose KV never comes: they count from their call on, and compute nothing.
        others = [
            stub.Decode(
                decode_pb2.DecodeRequest(
                    token_ids=[1, 2, 3], sampling=greedy(TOKENS), transfer_id=new_id()
                )
            )
            for _ in range(8)
        ]
        async with asyncio.timeout(60):
            await reported(decode, len(others))
        before = served(fleet, "decode")
        for _, question in itertools.islice(waiting, 20):
            await ask(channels[0], generate_request(question, greedy(4)))
        calls, _ = await ended(fleet, "decode", before, 20)
        for call in others:
            call.cancel()
        fleet.assert_back_to_idle(idle)
        if calls == [0, 20]:
            return
        # The router may have read of them after it had sent its first ones.
    pytest.fail(f"the busy worker had {calls[0]} of 20 requests")


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
        done, others = await asyncio.wait(seen, timeout=40, return_when=asyncio.FIRST_COMPLETED)
        for other in others:
            other.cancel()
    assert [one.result() for one in done] == [1]
    assert (await task).token_ids == reference.greedy(question, TOKENS)
