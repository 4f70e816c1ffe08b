"""Answers with tool calls are taken apart alike, wherever they are cut."""

import json

import pytest

from epd.text.forced_call import AnyCall, NamedCall, any_call_schema
from epd.text.hermes_calls import HermesCalls
from epd.text.llama_calls import LlamaCalls
from epd.text.tool_output import CallArguments, CallBegun, SaidText

CALL = '<tool_call>\n{"name": "look", "arguments": {"at": "ä </b> \\"x\\""}}\n</tool_call>'
ARGUMENTS = '{"at": "ä </b> \\"x\\""}'


def hermes():
    return HermesCalls(["look", "go"])


def told(output, *texts):
    """What is said, joined, and the calls with their arguments, joined, in their order."""
    found: list[str | tuple[str, str]] = []
    for pieces in (*(output.push(text) for text in texts), output.finish()):
        for piece in pieces:
            match piece:
                case CallBegun(name):
                    found.append((name, ""))
                case CallArguments(text):
                    last = found[-1]
                    assert isinstance(last, tuple), "arguments of a call that has not begun"
                    found[-1] = (last[0], last[1] + text)
                case SaidText(text):
                    assert text, "an empty piece says nothing"
                    if found and isinstance(found[-1], str):
                        found[-1] += text
                    else:
                        found.append(text)
    return found


def llama():
    return LlamaCalls(["look"])


LLAMA_CALL = '\n{"name": "look", "parameters": {"at": [1]}}'
CASES = [
    (llama, LLAMA_CALL, [("look", '{"at": [1]}')]),
    (llama, " say {", [" say {"]),
    (llama, LLAMA_CALL[:-1], [LLAMA_CALL[:-1]]),
    (llama, '{"name": "go", "parameters": {}}', ['{"name": "go", "parameters": {}}']),
    (llama, '{"name": ["look"]}', ['{"name": ["look"]}']),
    (llama, "", []),
    (hermes, "plain text\n", ["plain text\n"]),
    (hermes, " \n", [" \n"]),
    (hermes, CALL, [("look", ARGUMENTS)]),
    (hermes, "I look.\n" + CALL + "\n", ["I look.", ("look", ARGUMENTS)]),
    (
        hermes,
        CALL + "\n" + '<tool_call>{"name": "go"}</tool_call> done',
        [("look", ARGUMENTS), ("go", "{}"), " done"],
    ),
    (hermes, "a <tool_cal b </tool_call> <", ["a <tool_cal b </tool_call> <"]),
    (hermes, CALL.removesuffix("</tool_call>"), [("look", ARGUMENTS)]),
    (hermes, "a " + CALL[:30], ["a " + CALL[:30]]),
    (hermes, "a \n<tool_call>[]</tool_call>\nb", ["a \n<tool_call>[]</tool_call>\nb"]),
    (hermes, CALL.replace("look", "listen"), [CALL.replace("look", "listen")]),
    (hermes, '<tool_call>{"name": "go", "arguments": 3}</tool_call>', None),
    (lambda: NamedCall("go"), ARGUMENTS, [("go", ARGUMENTS)]),
    (lambda: NamedCall("go"), "", []),
    (AnyCall, '{"name": "a\\"b", "arguments": {"x": {}}}', [('a"b', '{"x": {}}')]),
    (AnyCall, '{"name": "go", "arguments": {}}', [("go", "{}")]),
    (AnyCall, '{"name": "go", "argum', ['{"name": "go", "argum']),
    (AnyCall, "", []),
]


@pytest.mark.parametrize(("make", "text", "expected"), CASES)
def test_an_answer_is_told_alike_wherever_it_is_cut(make, text, expected):
    expected = [text] if expected is None else expected
    assert told(make(), text) == expected
    assert told(make(), *text) == expected
    for cut in range(len(text) + 1):
        assert told(make(), text[:cut], text[cut:]) == expected


def test_text_that_can_be_no_tag_is_told_at_once():
    output = hermes()
    assert output.push("one two") == [SaidText("one two")]
    assert output.push(" <tool") == []
    assert output.push("s") == [SaidText(" <tools")]


def test_forced_arguments_are_told_as_they_come():
    output = AnyCall()
    assert output.push('{"name": "go", "arguments": {"a') == [
        CallBegun("go"),
        CallArguments('{"'),
    ]
    assert output.push("bc") == [CallArguments("ab")]
    assert NamedCall("go").push('{"a') == [CallBegun("go"), CallArguments('{"a')]


def test_references_inside_a_tools_schema_still_reach_its_own_root():
    schema = any_call_schema({"a": {}, "b": {"anyOf": [{"$ref": "#/$defs/x"}, {"$ref": "#"}]}})
    assert schema["$defs"]["tool1"] == {
        "anyOf": [{"$ref": "#/$defs/tool1/$defs/x"}, {"$ref": "#/$defs/tool1"}]
    }
    assert [choice["properties"]["name"] for choice in schema["anyOf"]] == [
        {"const": "a"},
        {"const": "b"},
    ]
    assert json.dumps(schema)
