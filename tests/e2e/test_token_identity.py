"""Four processes answer as one would."""

import asyncio

import pytest

from tests.support.ask import ask, generate_request, greedy, seeded
from tests.support.questions import make_questions

pytestmark = pytest.mark.timeout(900)

TOKENS = 32


async def ask_all(channel, questions, sampling, concurrency=16):
    """Answers in order of the questions, ``concurrency`` at a time."""
    gate = asyncio.Semaphore(concurrency)

    async def one(index, question):
        async with gate:
            return await ask(channel, generate_request(question, sampling(index)))

    return await asyncio.gather(*(one(n, question) for n, question in enumerate(questions)))


async def test_concurrent_greedy_answers_equal_transformers_generate(
    model, reference, shared_fleets, full_run, open_channel
):
    questions = make_questions(200 if full_run else 40, seed=7)
    fleet = shared_fleets.get(model)
    idle = fleet.idle_level()
    answers = await ask_all(
        open_channel(fleet.router_address), questions, lambda index: greedy(TOKENS)
    )
    longest = 0
    for question, answer in zip(questions, answers, strict=True):
        assert answer.token_ids == reference.greedy(question, TOKENS), question.text[:80]
        assert answer.completion.usage.completion_tokens == TOKENS
        longest = max(longest, answer.completion.usage.prompt_tokens)
    assert longest > 1024
    fleet.assert_back_to_idle(idle)


async def test_the_same_question_again_is_answered_the_same_from_the_caches(
    model, reference, shared_fleets, open_channel
):
    fleet = shared_fleets.get(model)
    channel = open_channel(fleet.router_address)
    (question,) = make_questions(5, seed=11)[2:3]
    expected = reference.greedy(question, TOKENS)
    first = await ask(channel, generate_request(question, greedy(TOKENS)))
    again = await ask(channel, generate_request(question, greedy(TOKENS)))
    assert first.token_ids == again.token_ids == expected
    assert again.completion.usage.cached_tokens > first.completion.usage.cached_tokens


async def test_seeded_answers_equal_a_unified_workers(model, shared_fleets, full_run, open_channel):
    questions = make_questions(40 if full_run else 12, seed=23)

    def sampling(index):
        return seeded(TOKENS, seed=1000 + index)

    apart = await ask_all(
        open_channel(shared_fleets.get(model).router_address), questions, sampling
    )
    alone = shared_fleets.get(model, encoders=0, prefills=0, decodes=0, unified=1)
    together = await ask_all(open_channel(alone.router_address), questions, sampling)
    assert [one.token_ids for one in apart] == [one.token_ids for one in together]
    assert len({tuple(one.token_ids) for one in apart}) == len(questions)


async def test_another_seed_gives_another_answer(model, shared_fleets, open_channel):
    channel = open_channel(shared_fleets.get(model).router_address)
    (question,) = make_questions(1, seed=29)
    answers = [
        await ask(channel, generate_request(question, seeded(TOKENS, seed))) for seed in (1, 2, 1)
    ]
    assert answers[0].token_ids == answers[2].token_ids != answers[1].token_ids
