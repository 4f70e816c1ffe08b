"""Videos over four services, and through one, are answered as plain transformers does."""

import base64
import random
from typing import Any

import pytest

from tests.support.ask import ask, generate_request, greedy
from tests.support.openai_client import openai_client
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


async def test_a_video_over_http_is_answered_as_over_grpc_and_by_transformers(
    model, reference, shared_fleets, open_channel
):
    fleet = shared_fleets.get(model)
    question = questions()[0]
    over_grpc = await ask(
        open_channel(fleet.router_address), generate_request(question, greedy(TOKENS))
    )
    assert over_grpc.token_ids == reference.greedy(question, TOKENS)
    frames = ",".join(base64.b64encode(one).decode() for one in question.videos[0].frames)
    video_url = {"url": f"data:video/jpeg;base64,{frames}", "fps": 2.5}
    content: list[Any] = [
        {"type": "video_url", "video_url": video_url},
        {"type": "text", "text": question.text},
    ]
    async with openai_client(fleet.http_address) as client:
        answer = await client.chat.completions.create(
            model=(await client.models.list()).data[0].id,
            messages=[{"role": "user", "content": content}],
            temperature=0,
            max_tokens=TOKENS,
            extra_body={"ignore_eos": True},
        )
    assert answer.choices[0].message.content == over_grpc.text
    assert answer.usage is not None
    assert answer.usage.prompt_tokens == over_grpc.completion.usage.prompt_tokens
