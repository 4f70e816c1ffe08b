"""Mixed load over two of every worker: every answer is the one a lone transformers gives."""

import asyncio

import pytest

from tests.support.ask import ask, generate_request, greedy
from tests.support.questions import make_questions
from tests.support.reference import Question

pytestmark = pytest.mark.timeout(600)

TOKENS = 12


async def test_f40_f27_mixed_load_and_equal_texts_with_other_images_over_two_of_each_worker(
    model, reference, shared_fleets, open_channel, full_run
):
    """Also F04: the second round runs at the same concurrency with cached prefixes."""
    fleet = shared_fleets.get(model, encoders=2, prefills=2, decodes=2)
    channel = open_channel(fleet.router_address)
    idle = fleet.idle_level()
    questions = make_questions(64 if full_run else 16, seed=40)
    pictures = [question.images[0] for question in questions if question.images]
    questions += [Question((picture,), "what is this") for picture in pictures[:6]]
    expected = [reference.greedy(question, TOKENS) for question in questions]
    gate = asyncio.Semaphore(16)

    async def one(question):
        async with gate:
            return await ask(channel, generate_request(question, greedy(TOKENS)))

    for _ in range(2):
        answers = await asyncio.gather(*map(one, questions))
        assert [answer.token_ids for answer in answers] == expected
    cached = [answer.completion.usage.cached_tokens for answer in answers]
    assert any(cached)
    fleet.assert_back_to_idle(idle, settled_within_s=15.0)
