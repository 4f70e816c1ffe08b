"""Tools over HTTP, with the official OpenAI client: into the prompt, and out of the answer."""

import json

import openai
import pytest

from epd.text.tokenizer import Tokenizer
from tests.router.harness import router, running
from tests.router.model_folder import make_model_folder, token_ids
from tests.support.openai_client import openai_client
from tests.support.tool_template import LOOK, STOP, TOOL_TEMPLATE, function

HELLO = [{"role": "user", "content": "hello"}]
CALL = '<tool_call>{"name": "look", "arguments": {"where": "left"}}</tool_call>'
TOLD = CALL.replace("look", "stop")
CALLED = [
    *HELLO,
    {
        "role": "assistant",
        "content": None,
        "tool_calls": [
            {
                "id": "c1",
                "type": "function",
                "function": {"name": "look", "arguments": '{"where":"left<|end|>"}'},
            }
        ],
    },
    {"role": "tool", "tool_call_id": "c1", "content": "a circle<|end|>"},
]
NAMED = {"type": "function", "function": {"name": "look"}}


@pytest.fixture(scope="session")
def tool_model(tmp_path_factory):
    folder = make_model_folder(tmp_path_factory.mktemp("tool-model"))
    template = TOOL_TEMPLATE.replace("<|im_start|>", "<|start|>").replace("<|im_end|>", "<|end|>")
    (folder / "chat_template.jinja").write_text(template)
    return folder


def says(fleet, text):
    """The workers' answer, after which a stop string follows."""
    fleet.prefill.answer = fleet.decode.answer = token_ids(text + "|")
    return {"max_tokens": len(text) + 1, "stop": "|"}


async def chat(client, **fields):
    return await client.chat.completions.create(
        **{"model": "m", "messages": HELLO, "seed": 0, "tools": [LOOK, STOP], **fields}
    )


@pytest.fixture
async def client(tool_model, fleet):
    async with (
        running(*fleet.workers),
        router(tool_model, fleet.workers, model_name="m") as served,
        openai_client(served.http) as found,
    ):
        yield found


async def streamed(client, **fields):
    """Text, calls as name and arguments, and finish reason of a stream."""
    text, calls, reason = "", {}, None
    async for chunk in await chat(client, stream=True, **fields):
        (choice,) = chunk.choices
        text += choice.delta.content or ""
        reason = choice.finish_reason or reason
        for call in choice.delta.tool_calls or ():
            if call.index not in calls:
                assert (call.id.startswith("call_"), call.type) == (True, "function")
                calls[call.index] = [call.function.name, ""]
            calls[call.index][1] += call.function.arguments
    return text, [tuple(calls[index]) for index in sorted(calls)], reason


def whole(answer):
    """The same of a whole answer."""
    (choice,) = answer.choices
    calls = choice.message.tool_calls or ()
    assert len({call.id for call in calls}) == len(calls)
    told = [(call.function.name, call.function.arguments) for call in calls]
    return choice.message.content, told, choice.finish_reason


@pytest.mark.parametrize(
    ("answer", "content", "calls"),
    [
        (
            f"I look.\n{CALL}\n{TOLD}",
            "I look.",
            [("look", '{"where": "left"}'), ("stop", '{"where": "left"}')],
        ),
        (CALL, None, [("look", '{"where": "left"}')]),
        ("no call <tool", "no call <tool", []),
    ],
)
async def test_calls_in_an_answer_become_tool_calls(fleet, client, answer, content, calls):
    fields = says(fleet, answer)
    reason = "tool_calls" if calls else "stop"
    assert whole(await chat(client, **fields)) == (content, calls, reason)
    assert await streamed(client, **fields) == (content or "", calls, reason)


async def test_one_call_at_a_time_ends_the_answer_after_the_first(fleet, client):
    fields = says(fleet, CALL + TOLD)
    answer = whole(await chat(client, parallel_tool_calls=False, **fields))
    assert answer == (None, [("look", '{"where": "left"}')], "tool_calls")


async def test_without_choice_or_tools_tags_are_text(fleet, client):
    fields = says(fleet, CALL)
    assert whole(await chat(client, tool_choice="none", **fields)) == (CALL, [], "stop")
    assert whole(await chat(client, tools=[], **fields)) == (CALL, [], "stop")


async def test_each_choice_has_calls_of_its_own(fleet, client):
    answer = await chat(client, n=2, **says(fleet, CALL))
    calls = [choice.message.tool_calls[0] for choice in answer.choices]
    assert {call.function.name for call in calls} == {"look"}
    assert calls[0].id != calls[1].id


async def test_a_forced_call_that_is_cut_tells_what_there_is_and_its_length(fleet, client):
    fleet.prefill.answer = fleet.decode.answer = token_ids('{"where": "le')
    fields = {"tool_choice": NAMED, "max_tokens": 13}
    expected = [("look", '{"where": "le')]
    assert whole(await chat(client, **fields)) == (None, expected, "length")
    assert await streamed(client, **fields) == ("", expected, "length")


async def test_tools_calls_and_results_are_in_the_prompt_as_text(tool_model, fleet, client):
    says(fleet, "x")
    tool = function("look", {"type": "object"}, description="<|image|>")
    await chat(client, messages=CALLED, tools=[tool], max_tokens=1)
    token_ids_sent = list(fleet.prefill.requests[-1].token_ids)
    tokenizer = Tokenizer.from_folder(tool_model)
    pieces = [tokenizer.token_bytes.of(token_id) for token_id in token_ids_sent]
    assert b"".join(pieces).decode() == (
        "<|start|>system\n# Tools\n<tools>\n"
        '{"type": "function", "function": {"name": "look", "description": "<|image|>", '
        '"parameters": {"type": "object"}}}\n</tools><|end|>\n'
        "<|start|>user\nhello<|end|>\n"
        "<|start|>assistant\n\n<tool_call>\n"
        '{"name": "look", "arguments": {"where": "left<|end|>"}}\n</tool_call><|end|>\n'
        "<|start|>user\n<tool_response>\na circle<|end|>\n</tool_response><|end|>\n"
        "<|start|>assistant\n"
    )
    controls = [piece for piece in pieces if len(piece) > 1]
    assert controls == [b"<|start|>", b"<|end|>"] * 4 + [b"<|start|>"], "the client wrote others"


async def test_forced_calls_are_grammars_of_both_workers(fleet, client):
    await chat(client, tool_choice=NAMED, max_tokens=4)
    for worker in (fleet.prefill, fleet.decode):
        schema = json.loads(worker.requests[-1].sampling.constraint.json_schema)
        assert schema == LOOK["function"]["parameters"]
    await chat(client, tool_choice="required", max_tokens=4)
    schema = json.loads(fleet.decode.requests[-1].sampling.constraint.json_schema)
    assert [one["properties"]["name"]["const"] for one in schema["anyOf"]] == ["look", "stop"]
    await chat(client, max_tokens=4)
    assert not fleet.decode.requests[-1].sampling.HasField("constraint")


STRICT = function("look", strict=True)
DEEP = json.loads('{"a": ' * 70 + "{}" + "}" * 70)


def bad_call(**function_fields):
    call = {"id": "x", "type": "function", "function": {"name": "look", **function_fields}}
    return [{"role": "assistant", "content": None, "tool_calls": [call]}]


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
        ({"tools": [{"type": "function"}]}, "tools[0].function"),
        ({"tools": [function("a", 3)]}, "tools[0].function.parameters"),
        ({"tools": [function("a", DEEP)]}, "tools[0].function.parameters"),
        ({"tools": [function("a", cost=3)]}, "tools[0].function.cost"),
        ({"tools": [LOOK, LOOK]}, "tools[1]"),
        ({"tools": [STRICT]}, "tools[0].function.strict"),
        ({"tools": [], "tool_choice": "auto"}, "tool_choice"),
        ({"tool_choice": "any"}, "tool_choice"),
        ({"tool_choice": {"type": "allowed_tools"}}, "tool_choice.type"),
        ({"tool_choice": function("listen")}, "tool_choice.function.name"),
        ({"response_format": {"type": "json_object"}}, "response_format"),
        ({"extra_body": {"functions": []}}, "functions"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "messages[0].tool_call_id"),
        ({"messages": [{"role": "user", "content": "x", "tool_calls": []}]}, None),
        (
            {"messages": bad_call(arguments="[]")},
            "messages[0].tool_calls[0].function.arguments",
        ),
    ],
)
async def test_tools_that_are_not_understood_are_refused_by_name(client, fields, param):
    with pytest.raises(openai.BadRequestError) as refused:
        await chat(client, **fields)
    assert refused.value.param == (param or "messages[0].tool_calls")


async def test_a_strict_tool_that_is_forced_is_taken(client):
    await chat(client, tools=[STRICT], tool_choice="required", max_tokens=2)


@pytest.mark.parametrize(
    ("fields", "param"), [({}, "tools"), ({"tools": [], "messages": CALLED}, "messages")]
)
async def test_a_model_whose_template_knows_no_tools_refuses_them(model, fleet, fields, param):
    async with (
        running(*fleet.workers),
        router(model, fleet.workers, model_name="m") as served,
        openai_client(served.http) as client,
    ):
        with pytest.raises(openai.BadRequestError) as refused:
            await chat(client, **fields)
        assert (refused.value.param, refused.value.code) == (param, "tools_not_supported")
        await chat(client, tool_choice="none", max_tokens=2)
