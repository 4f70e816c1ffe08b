"""Every feature level of an image or video comes over the wire and out of the cache."""

import random

import pytest

from epd.media import Video
from tests.support.ask import ask, generate_request, greedy
from tests.support.questions import make_image, make_questions, make_video
from tests.support.reference import Question, Reference
from tests.support.tiny_model import make_tiny_qwen3vl

pytestmark = pytest.mark.timeout(600)
TOKENS = 24
UNIFIED = {"encoders": 0, "prefills": 0, "decodes": 0, "unified": 1}


@pytest.fixture(scope="module")
def deepstack_model(tmp_path_factory):
    return make_tiny_qwen3vl(tmp_path_factory.mktemp("tiny-qwen3vl"))


@pytest.fixture(scope="module")
def deepstack_reference(deepstack_model):
    return Reference(deepstack_model)


@pytest.mark.full
@pytest.mark.parametrize("fleet_options", [{}, UNIFIED])
async def test_answers_of_a_model_with_feature_levels_equal_transformers_generate(
    deepstack_model, deepstack_reference, shared_fleets, open_channel, fleet_options
):
    channel = open_channel(shared_fleets.get(deepstack_model, **fleet_options).router_address)
    for question in make_questions(6, seed=5):
        expected = deepstack_reference.greedy(question, TOKENS)
        for _ in range(2):  # the second time out of the caches
            answer = await ask(channel, generate_request(question, greedy(TOKENS)))
            assert answer.token_ids == expected, question.text[:80]


def video_questions():
    source = random.Random(6)
    many = make_video(source, 21)
    return [
        Question((), "what happens here?", (make_video(source, 4),)),
        Question((), "an odd number of frames, small ones", (many,)),
        Question((make_image(source),), "one of each", (make_video(source, 2),)),
        Question((), "two videos", (make_video(source, 3), make_video(source, 6))),
        # The same frames, so the same embedding; that time passes otherwise stands in the text.
        Question((), "slowly", (Video(many.frames, tuple(5.0 * n for n in range(21))),)),
    ]


@pytest.mark.parametrize("fleet_options", [{}, pytest.param(UNIFIED, marks=pytest.mark.full)])
async def test_answers_about_videos_with_feature_levels_equal_transformers_generate(
    deepstack_model, deepstack_reference, shared_fleets, open_channel, fleet_options
):
    fleet = shared_fleets.get(deepstack_model, **fleet_options)
    idle = fleet.idle_level()
    channel = open_channel(fleet.router_address)
    answers = []
    for question in video_questions():
        answer = await ask(channel, generate_request(question, greedy(TOKENS)))
        assert answer.token_ids == deepstack_reference.greedy(question, TOKENS), question.text
        answers.append(tuple(answer.token_ids))
    assert len(set(answers)) == len(answers)
    again = await ask(channel, generate_request(video_questions()[1], greedy(TOKENS)))
    assert tuple(again.token_ids) == answers[1]
    fleet.assert_back_to_idle(idle)
