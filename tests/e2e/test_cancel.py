"""A client that goes away, at every stage: all memory and every queue slot come back."""

import asyncio
import contextlib
import random

import grpc
import pytest

from tests.support.ask import ask, generate_request, greedy
from tests.support.faults import frozen
from tests.support.questions import make_questions
from tests.support.reference import Question

pytestmark = pytest.mark.timeout(600)

LONG_TEXT = "a long story about red circles and blue squares " * 70  # about 3400 tokens


@pytest.fixture
def fleet(model, shared_fleets):
    return shared_fleets.get(model)


@pytest.fixture
def channel(fleet, open_channel):
    return open_channel(fleet.router_address)


async def cancelled(task):
    """Cancels a request as a client does, and waits until it is over here."""
    task.cancel()
    with pytest.raises((asyncio.CancelledError, grpc.aio.AioRpcError)):
        await task


async def until(condition, within_s=60.0):
    """Polls, off the event loop."""
    async with asyncio.timeout(within_s):
        while not await asyncio.to_thread(condition):
            await asyncio.sleep(0.01)


async def computes(fleet, task):
    """True once prefill computes a prompt, False when decode has it already."""
    async with asyncio.timeout(60):
        while not task.done():
            if (await asyncio.to_thread(fleet.scrape, "prefill-0")).total(
                "epd_kv_cache_block_usage"
            ):
                return True
            if (await asyncio.to_thread(fleet.scrape, "decode-0")).total("epd_request_running"):
                return False
    return False


async def assert_answers(channel, reference, question, tokens=16):
    answer = await ask(channel, generate_request(question, greedy(tokens)))
    assert answer.token_ids == reference.greedy(question, tokens)


@pytest.mark.parametrize("stage", ["encoder-0", "prefill-0", "decode-0"])
async def test_a_cancel_while_a_stage_hangs_leaves_nothing_behind(stage, fleet, channel, reference):
    """Encoder: in Encode. Prefill: before its answer. Decode: in Reserve."""
    idle = fleet.idle_level()
    (question,) = make_questions(3, seed=100 + len(stage))[2:]
    with frozen(fleet, stage):
        task = asyncio.create_task(ask(channel, generate_request(question, greedy(500))))
        await asyncio.sleep(1.0)
        assert not task.done()
        await cancelled(task)
    fleet.assert_back_to_idle(idle, settled_within_s=20)
    await assert_answers(channel, reference, question)


async def test_a_cancel_during_the_forward_pass_stops_prefill_and_frees_the_reservation(
    fleet, channel, reference
):
    idle = fleet.idle_level()
    images = make_questions(2, seed=103)[1].images
    for number in range(5):  # it may be over before it is seen
        question = Question(images, f"{number}: {LONG_TEXT}")
        task = asyncio.create_task(ask(channel, generate_request(question, greedy(500))))
        if caught := await computes(fleet, task):
            break
        await cancelled(task)
    assert caught
    await cancelled(task)
    fleet.assert_back_to_idle(idle, settled_within_s=20)
    await assert_answers(channel, reference, make_questions(2, seed=104)[1])


async def test_a_cancel_while_tokens_stream_frees_decode(fleet, channel, reference):
    idle = fleet.idle_level()
    (question,) = make_questions(2, seed=105)[1:]
    task = asyncio.create_task(ask(channel, generate_request(question, greedy(3000))))
    await until(lambda: fleet.scrape("decode-0").total("epd_request_running") > 0)
    await asyncio.sleep(0.2)
    await cancelled(task)
    fleet.assert_back_to_idle(idle, settled_within_s=20)
    await assert_answers(channel, reference, question)


async def test_a_deadline_ends_the_request_everywhere(fleet, channel, reference):
    idle = fleet.idle_level()
    (question,) = make_questions(2, seed=106)[1:]
    with pytest.raises(grpc.aio.AioRpcError) as refusal:
        await ask(channel, generate_request(question, greedy(3000)), timeout_s=0.7)
    assert refusal.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
    fleet.assert_back_to_idle(idle, settled_within_s=20)
    await assert_answers(channel, reference, question)


async def test_a_storm_of_cancels_at_random_moments_leaks_nothing_and_spoils_no_answer(
    fleet, channel, reference, full_run
):
    idle = fleet.idle_level()
    source = random.Random(107)
    questions = make_questions(400 if full_run else 40, seed=107)
    gate = asyncio.Semaphore(12)
    finished = []

    async def one(question, patience_s):
        async with gate:
            request = generate_request(question, greedy(32))
            if patience_s is None:
                finished.append((question, await ask(channel, request)))
                return
            # It may also be quicker than its client: fine.
            with contextlib.suppress(TimeoutError, grpc.aio.AioRpcError):
                await asyncio.wait_for(ask(channel, request), patience_s)

    # Every third client stays, the others leave at some moment of their request's life.
    await asyncio.gather(
        *(
            one(question, None if index % 3 == 0 else source.uniform(0.0, 0.6))
            for index, question in enumerate(questions)
        )
    )
    fleet.assert_back_to_idle(idle, settled_within_s=20)
    for question, answer in finished:
        assert answer.token_ids == reference.greedy(question, 32)
    assert len(finished) == -(-len(questions) // 3)
