"""Forced tool calls of a real engine, which prefills by itself and in chunks."""

import json
import re

import openai
import pytest

from tests.support.openai_client import openai_client
from tests.support.tiny_model import make_tiny_llama
from tests.support.tool_template import LOOK, STOP, TOOL_TEMPLATE

#: Shorter than the prompt, which so takes several steps.
CHUNK = 64


@pytest.fixture(scope="session")
def tool_model(tmp_path_factory):
    folder = make_tiny_llama(tmp_path_factory.mktemp("tool-llama"))
    (folder / "chat_template.jinja").write_text(TOOL_TEMPLATE)
    return folder


@pytest.fixture
def fleet(tool_model, shared_fleets):
    return shared_fleets.get(
        tool_model,
        encoders=0,
        prefills=0,
        decodes=0,
        unified=1,
        flags={"router": ["--disaggregation-mode=null"], "decode": [f"--token-budget={CHUNK}"]},
    )


@pytest.fixture
async def client(fleet):
    async with openai_client(fleet.http_address) as found:
        yield found


async def chat(client, **fields):
    return await client.chat.completions.create(
        **{
            "model": (await client.models.list()).data[0].id,
            "messages": [{"role": "user", "content": "which way?"}],
            "max_tokens": 200,
            **fields,
        }
    )


def check(call):
    """The name of a call whose arguments must follow its tool's schema."""
    arguments = json.loads(call.function.arguments)
    if call.function.name == "stop":
        assert arguments == {}
    else:
        assert set(arguments) == {"where", "closely"}
        assert arguments["where"] in ("left", "right")
        assert isinstance(arguments["closely"], bool)
    return call.function.name


@pytest.mark.parametrize("seed", range(3))
async def test_a_forced_call_has_valid_arguments_whole_and_streamed(fleet, client, seed):
    idle = fleet.idle_level()
    fields = {"tools": [LOOK, STOP], "tool_choice": "required", "seed": seed}
    answer = await chat(client, **fields)
    assert answer.usage.prompt_tokens > 3 * CHUNK
    (choice,) = answer.choices
    (call,) = choice.message.tool_calls
    check(call)
    assert (choice.message.content, choice.finish_reason) == (None, "tool_calls")
    name, arguments = "", ""
    async for chunk in await chat(client, stream=True, **fields):
        for piece in chunk.choices[0].delta.tool_calls or ():
            name += piece.function.name or ""
            arguments += piece.function.arguments
    assert (name, arguments) == (call.function.name, call.function.arguments)
    fleet.assert_back_to_idle(idle)


async def test_a_named_call_is_of_that_tool_and_its_result_goes_back(client):
    named = {"type": "function", "function": {"name": "look"}}
    answer = await chat(client, tools=[LOOK, STOP], tool_choice=named, seed=1)
    message = answer.choices[0].message
    (call,) = message.tool_calls
    assert check(call) == "look"
    result = {"role": "tool", "tool_call_id": call.id, "content": "a circle"}
    asked = {"role": "user", "content": "which way?"}
    more = await chat(client, messages=[asked, message, result], tools=[LOOK, STOP], max_tokens=4)
    assert more.usage.prompt_tokens > answer.usage.prompt_tokens


async def test_a_tools_malformed_schema_is_the_clients_fault(client):
    broken = {"type": "function", "function": {"name": "x", "parameters": {"type": "nonsense"}}}
    with pytest.raises(openai.BadRequestError) as refused:
        await chat(client, tools=[broken], tool_choice="required")
    assert refused.value.param == "tools"


async def test_a_worker_that_prefills_by_itself_in_chunks_follows_a_grammar(client):
    """The prompt's last chunk draws the first token, which must be masked as the others are."""
    answer = await chat(
        client,
        messages=[{"role": "user", "content": "spell " * CHUNK}],
        temperature=1.5,
        seed=1,
        extra_body={"structured_outputs": {"regex": "(ab|cd){5}[0-9]"}},
        n=3,
    )
    assert answer.usage.prompt_tokens > 5 * CHUNK
    for choice in answer.choices:
        assert re.fullmatch("(ab|cd){5}[0-9]", choice.message.content)
        assert choice.finish_reason == "stop"
