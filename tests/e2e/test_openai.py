"""The official OpenAI client against real workers."""

import base64
import json
import re

import openai
import pytest

from tests.support.ask import ask, generate_request, greedy
from tests.support.openai_client import openai_client
from tests.support.questions import make_questions

TOKENS = 24


@pytest.fixture
async def client(model, shared_fleets):
    async with openai_client(shared_fleets.get(model).http_address) as found:
        yield found


def messages(question):
    urls = ["data:image/png;base64," + base64.b64encode(data).decode() for data in question.images]
    parts = [{"type": "image_url", "image_url": {"url": url}} for url in urls]
    return [{"role": "user", "content": [*parts, {"type": "text", "text": question.text}]}]


async def test_answers_about_images_are_those_of_transformers_with_their_alternatives(
    model, reference, shared_fleets, open_channel, client
):
    fleet = shared_fleets.get(model)
    question = make_questions(3, seed=301)[2]
    assert question.images
    request = generate_request(question, greedy(TOKENS))
    request.logprobs = True
    request.sampling.top_logprobs = 3
    over_grpc = await ask(open_channel(fleet.router_address), request)
    assert over_grpc.token_ids == reference.greedy(question, TOKENS)
    answer = await client.chat.completions.create(
        model=(await client.models.list()).data[0].id,
        messages=messages(question),
        temperature=0,
        max_tokens=TOKENS,
        logprobs=True,
        top_logprobs=3,
        extra_body={"ignore_eos": True},
    )
    (choice,) = answer.choices
    assert choice.message.content == over_grpc.text
    assert answer.usage.prompt_tokens == over_grpc.completion.usage.prompt_tokens
    content = choice.logprobs.content
    assert [token.logprob for token in content] == pytest.approx(over_grpc.logprobs, abs=1e-4)
    for token, top in zip(content, over_grpc.top_logprobs, strict=True):
        values = [other.logprob for other in token.top_logprobs]
        assert values == pytest.approx(list(top.logprobs), abs=1e-4)
        assert max(values) == pytest.approx(token.logprob, abs=1e-6)


async def test_a_stream_that_is_closed_leaves_nothing_behind(model, shared_fleets, client):
    fleet = shared_fleets.get(model)
    idle = fleet.idle_level()
    stream = await client.chat.completions.create(
        model=(await client.models.list()).data[0].id,
        messages=messages(make_questions(3, seed=302)[2]),
        max_tokens=2000,
        stream=True,
        extra_body={"ignore_eos": True},
    )
    async for _ in stream:
        break
    await stream.close()
    fleet.assert_back_to_idle(idle)


async def test_an_answer_follows_its_json_schema_over_prefill_and_decode(client):
    schema = {
        "type": "object",
        "properties": {"shape": {"enum": ["circle", "square"]}, "count": {"type": "integer"}},
        "required": ["shape", "count"],
        "additionalProperties": False,
    }
    answer = await client.chat.completions.create(
        model=(await client.models.list()).data[0].id,
        messages=messages(make_questions(3, seed=303)[2]),
        seed=1,
        max_tokens=300,
        logit_bias={str(digit): -100 for digit in range(ord("0"), ord("9"))},
        response_format={"type": "json_schema", "json_schema": {"name": "x", "schema": schema}},
    )
    (choice,) = answer.choices
    if choice.finish_reason == "stop":
        assert set(json.loads(choice.message.content)) == {"shape", "count"}
    else:  # a random model may write digits for ever
        assert re.match(r'\{"shape": "(circle|square)", "count": -?\d+', choice.message.content)


async def test_a_malformed_schema_is_the_clients_fault(model, shared_fleets, client):
    fleet = shared_fleets.get(model)
    idle = fleet.idle_level()
    with pytest.raises(openai.BadRequestError) as refused:
        await client.chat.completions.create(
            model=(await client.models.list()).data[0].id,
            messages=messages(make_questions(1, seed=304)[0]),
            response_format={
                "type": "json_schema",
                "json_schema": {"name": "x", "schema": {"type": "nonsense"}},
            },
        )
    assert refused.value.param == "response_format"
    fleet.assert_back_to_idle(idle)


async def test_choices_share_the_prompt_through_the_prefix_cache(model, shared_fleets, client):
    fleet = shared_fleets.get(model)
    question = make_questions(3, seed=305)[2]
    before = fleet.scrape("prefill-0").total("epd_prefix_cache_hit_total")
    answer = await client.chat.completions.create(
        model=(await client.models.list()).data[0].id,
        messages=messages(question),
        max_tokens=12,
        seed=2,
        n=3,
        extra_body={"ignore_eos": True},
    )
    assert len({choice.message.content for choice in answer.choices}) == 3
    hits = fleet.scrape("prefill-0").total("epd_prefix_cache_hit_total") - before
    # All of the prompt but the last block, which is not full, twice.
    assert hits >= 2 * (answer.usage.prompt_tokens - 32)
