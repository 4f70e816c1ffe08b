"""Prefill begins while later images are still encoded: same answers, and nothing is left behind."""

import asyncio
import random

import grpc
import pytest

from tests.support.ask import ask, generate_request, greedy
from tests.support.questions import make_image, make_questions
from tests.support.reference import Question

pytestmark = pytest.mark.timeout(600)

#: One image per forward pass, so that they get ready one after the other.
FLAGS = {"router": ["--encode-overlap=true"], "encoder": ["--max-batch=1"]}

#: Half of what a quarantine would last.
SETTLED_S = 15.0


@pytest.fixture
def fleet(model, shared_fleets):
    return shared_fleets.get(model, flags=FLAGS)


@pytest.fixture
def channel(fleet, open_channel):
    return open_channel(fleet.router_address)


def overlapped(fleet):
    return fleet.scrape("router").total("epd_route_encode_overlap_total")


async def test_answers_equal_transformers_generate(fleet, channel, reference, full_run):
    idle = fleet.idle_level()
    before = overlapped(fleet)
    questions = [q for q in make_questions(200 if full_run else 20, seed=61) if q.images]
    for question in questions:
        answer = await ask(channel, generate_request(question, greedy(16)))
        assert answer.token_ids == reference.greedy(question, 16)
        again = await ask(channel, generate_request(question, greedy(16)))
        assert again.token_ids == answer.token_ids
    assert overlapped(fleet) - before >= len(questions) / 2
    fleet.assert_back_to_idle(idle, settled_within_s=SETTLED_S)
    together = make_questions(24, seed=62)
    answers = await asyncio.gather(
        *(ask(channel, generate_request(question, greedy(16))) for question in together)
    )
    for question, answer in zip(together, answers, strict=True):
        assert answer.token_ids == reference.greedy(question, 16)
    fleet.assert_back_to_idle(idle, settled_within_s=SETTLED_S)


async def test_an_image_that_fails_late_ends_the_request_and_frees_everything(
    fleet, channel, reference
):
    idle = fleet.idle_level()
    source = random.Random(63)
    for number in range(4):
        good = [make_image(source) for _ in range(4)]
        broken = make_image(source)[:-60]
        images = [*good[:number], broken, *good[number:]]
        question = Question(tuple(images), "what is it?")
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await ask(channel, generate_request(question, greedy(8)))
        assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert f"images[{number}]" in (caught.value.details() or "")
        fleet.assert_back_to_idle(idle, settled_within_s=SETTLED_S)
    (question,) = make_questions(2, seed=64)[1:]
    answer = await ask(channel, generate_request(question, greedy(16)))
    assert answer.token_ids == reference.greedy(question, 16)


async def test_cancels_at_random_moments_leave_nothing_behind(fleet, channel, full_run):
    idle = fleet.idle_level()
    source = random.Random(65)
    for question in make_questions(200 if full_run else 25, seed=66, long_every=10**6):
        task = asyncio.create_task(ask(channel, generate_request(question, greedy(8))))
        await asyncio.sleep(source.uniform(0, 0.4))
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
    fleet.assert_back_to_idle(idle, settled_within_s=SETTLED_S)
