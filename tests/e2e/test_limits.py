"""More than there is room for: refused at once and typed, or finished by replay; nothing lost."""

import asyncio

import grpc
import pytest

from epd.errors import InvalidRequestError, ResourceExhaustedError
from epd.rpc.status import error_from_rpc
from epd.v1 import common_pb2
from tests.support.ask import ask, generate_request, greedy, seeded
from tests.support.questions import make_questions
from tests.support.reference import Question

pytestmark = pytest.mark.timeout(600)

#: 60 blocks of 32 tokens for everybody; two requests compute at a time, two may wait.
SMALL = {
    "prefill": ("--kv-blocks=60", "--max-running=2", "--max-waiting=2", "--token-budget=64"),
    "decode": ("--kv-blocks=60", "--max-running=8", "--quarantine-hold-s=40"),
}
#: The same memory with queues that hold a few requests more.
TIGHT = {
    "prefill": ("--kv-blocks=60", "--max-running=8", "--token-budget=64"),
    "decode": SMALL["decode"],
}
#: What a lost hand-over would leave behind.
LOST = (
    "epd_kv_transfer_failed_total",
    "epd_embedding_transfer_failed_total",
    "epd_lease_expired_total",
    "epd_lease_unknown_renewal_total",
)
PLAIN = "tell me about the blue square please"


@pytest.fixture
def fleet(model, shared_fleets):
    return shared_fleets.get(model, flags=SMALL)


@pytest.fixture
def channel(fleet, open_channel):
    return open_channel(fleet.router_address)


async def refused(call):
    """The typed error of a call."""
    with pytest.raises(grpc.aio.AioRpcError) as refusal:
        await call
    return error_from_rpc(refusal.value)


def preemptions(fleet):
    return fleet.scrape("decode-0").total("epd_request_preemption_total")


async def preempting(fleet, channel, requests):
    """Answers to requests that outgrow decode together; again when they did not run together."""
    for _ in range(4):
        before = preemptions(fleet)
        answers = await asyncio.gather(*(ask(channel, request) for request in requests))
        if preemptions(fleet) > before:
            return answers
    pytest.fail("nothing was preempted")


async def test_a_prompt_longer_than_the_context_is_refused_with_both_numbers(fleet, channel):
    idle = fleet.idle_level()
    question = Question((), "x" * 5000)
    error = await refused(ask(channel, generate_request(question, greedy(4))))
    assert isinstance(error, InvalidRequestError)
    assert "5019" in error.message
    fleet.assert_back_to_idle(idle)


@pytest.mark.parametrize(
    ("field", "value"),
    [("temperature", -1.0), ("top_p", 0.0), ("min_p", 2.0), ("max_tokens", 0)],
)
async def test_a_sampling_parameter_out_of_range_is_refused_by_name(field, value, channel):
    sampling = common_pb2.SamplingParams(**{field: value})
    error = await refused(ask(channel, generate_request(Question((), PLAIN), sampling)))
    assert isinstance(error, InvalidRequestError)
    assert field in error.field


async def test_a_burst_is_served_or_refused_with_a_retry_hint_and_nothing_stays(
    fleet, channel, reference
):
    idle = fleet.idle_level()
    questions = make_questions(24, seed=71, long_every=6)

    async def one(question):
        try:
            answer = await ask(channel, generate_request(question, greedy(16)))
        except grpc.aio.AioRpcError as refusal:
            return question, error_from_rpc(refusal)
        return question, answer.token_ids

    results = await asyncio.gather(*(one(question) for question in questions))
    answered = [(q, found) for q, found in results if isinstance(found, list)]
    errors = [found for _, found in results if not isinstance(found, list)]
    assert len(answered) >= 4
    for_good = [error for error in errors if isinstance(error, InvalidRequestError)]
    for_now = [error for error in errors if error not in for_good]
    # The longest could never have more than their prefill worker's share of decode's memory.
    assert {error.reason for error in for_good} <= {"PROMPT_EXCEEDS_MEMORY"}
    assert for_now
    assert all(isinstance(error, ResourceExhaustedError) for error in for_now), for_now
    assert all(error.retry_after_s > 0 for error in for_now)
    for question, tokens in answered:
        assert tokens == reference.greedy(question, 16)
    fleet.assert_back_to_idle(idle, settled_within_s=20)


async def test_a_burst_on_a_loaded_decode_worker_loses_nothing(fleet, channel, reference):
    """64 at once while long answers run: each is answered, at once or when it asks again."""
    idle = fleet.idle_level()
    before = {name: [fleet.scrape(name).total(one) for one in LOST] for name in fleet.processes}
    questions = make_questions(32, seed=73, long_every=1)  # none as long as half the memory
    deadline = asyncio.get_running_loop().time() + 200
    refusals = 0

    async def persistent(question):
        nonlocal refusals
        while True:
            try:
                return await ask(channel, generate_request(question, greedy(8)))
            except grpc.aio.AioRpcError as refusal:
                error = error_from_rpc(refusal)
                assert isinstance(error, ResourceExhaustedError), error
                assert asyncio.get_running_loop().time() < deadline, "refused for ever"
                refusals += 1
            await asyncio.sleep(error.retry_after_s)

    long_ones = [Question((), f"{index} {PLAIN}") for index in range(2)]
    running = [
        asyncio.create_task(ask(channel, generate_request(one, greedy(300)))) for one in long_ones
    ]
    async with asyncio.timeout(60):
        while fleet.scrape("decode-0").total("epd_request_running") < len(running):
            await asyncio.sleep(0.02)
    answers = await asyncio.gather(*map(persistent, 2 * questions))
    assert refusals, "the burst was no more than the fleet takes"
    expected = [reference.greedy(question, 8) for question in questions]
    assert [answer.token_ids for answer in answers] == 2 * expected
    for question, answer in zip(long_ones, await asyncio.gather(*running), strict=True):
        assert answer.token_ids == reference.greedy(question, 300)
    after = {name: [fleet.scrape(name).total(one) for one in LOST] for name in fleet.processes}
    assert after == before
    fleet.assert_back_to_idle(idle, settled_within_s=20)


async def test_requests_that_outgrow_decode_are_preempted_replayed_and_answered_the_same(
    model, shared_fleets, open_channel, reference, full_run
):
    """Six answers of 350 tokens need 72 blocks, decode has 60."""
    fleet = shared_fleets.get(model, flags=TIGHT)
    channel = open_channel(fleet.router_address)
    idle = fleet.idle_level()
    questions = [Question((), f"{index} {PLAIN}") for index in range(6)]
    requests = [generate_request(question, greedy(350)) for question in questions]
    answers = await preempting(fleet, channel, requests)
    # The last to join are the ones that are preempted; generate takes seconds for each.
    checked = list(zip(questions, answers, strict=True))[0 if full_run else -2 :]
    for question, answer in checked:
        assert answer.token_ids == reference.greedy(question, 350)
    fleet.assert_back_to_idle(idle, settled_within_s=20)


async def test_preempted_answers_with_seeded_draws_are_those_of_an_undisturbed_run(
    model, shared_fleets, open_channel
):
    """The draws of a replay go on where the preempted ones ended: exactly the same in float32."""
    fleet = shared_fleets.get(model, flags=TIGHT)
    channel = open_channel(fleet.router_address)
    idle = fleet.idle_level()
    requests = [
        generate_request(Question((), f"{index} {PLAIN}"), seeded(350, seed=900 + index))
        for index in range(6)
    ]

    before = preemptions(fleet)
    alone = [await ask(channel, request) for request in requests]
    assert preemptions(fleet) == before
    together = await preempting(fleet, channel, requests)
    for undisturbed, answer in zip(alone, together, strict=True):
        assert len(answer.token_ids) == 350
        assert answer.token_ids == undisturbed.token_ids
        assert answer.text == undisturbed.text
    assert len({tuple(answer.token_ids) for answer in alone}) == len(requests)
    fleet.assert_back_to_idle(idle, settled_within_s=20)


async def test_a_reservation_that_finds_no_memory_waits_and_is_dropped_with_its_client(
    model, shared_fleets, open_channel, reference
):
    """Decode's blocks are taken by long prompts; another one queues there, then its client goes."""
    fleet = shared_fleets.get(model, flags=TIGHT)
    channel = open_channel(fleet.router_address)
    idle = fleet.idle_level()
    big = [Question((), f"{index} " + "y" * 850) for index in range(3)]
    tasks = [
        asyncio.create_task(ask(channel, generate_request(question, greedy(200))))
        for question in big
    ]
    await asyncio.sleep(0.5)
    tasks[-1].cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    fleet.assert_back_to_idle(idle, settled_within_s=20)
    answer = await ask(channel, generate_request(big[-1], greedy(16)))
    assert answer.token_ids == reference.greedy(big[-1], 16)
