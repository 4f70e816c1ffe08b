"""Videos over four services, and through one, are answered as plain transformers does."""

import random

import pytest

from tests.support.ask import ask, generate_request, greedy
from tests.support.questions import make_image, make_long_video, make_video
from tests.support.reference import Question

pytestmark = pytest.mark.timeout(600)
TOKENS = 24


def questions():
    source = random.Random(3)
    return [
        Question((), "what happens here?", (make_video(source, 4),)),
        Question((), "an odd number of frames", (make_video(source, 5),)),
        Question((), "a single frame", (make_video(source, 1),)),
        Question((make_image(source),), "one of each", (make_video(source, 2),)),
        Question((), "two videos", (make_video(source, 3), make_video(source, 6))),
        Question((), "long", (make_long_video(source),)),
        Question((), "long?", (make_long_video(source), make_video(source, 2))),
    ]


@pytest.mark.parametrize(
    "fleet_options", [{}, {"encoders": 0, "prefills": 0, "decodes": 0, "unified": 1}]
)
async def test_answers_about_videos_equal_transformers_generate(
    model, reference, shared_fleets, open_channel, fleet_options
):
    fleet = shared_fleets.get(model, **fleet_options)
    idle = fleet.idle_level()
    channel = open_channel(fleet.router_address)
    answers = []
    for question in questions():
        answer = await ask(channel, generate_request(question, greedy(TOKENS)))
        assert answer.token_ids == reference.greedy(question, TOKENS), question.text
        answers.append(tuple(answer.token_ids))
    assert len(set(answers)) == len(answers)
    again = await ask(channel, generate_request(questions()[1], greedy(TOKENS)))
    assert tuple(again.token_ids) == answers[1]
    fleet.assert_back_to_idle(idle)
