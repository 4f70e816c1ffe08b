"""Tools, calls and their results in the form that chat templates take."""

import json
from collections.abc import Iterator, Sequence
from typing import Any

from epd.errors import UnsupportedFeatureError
from epd.text.chat_template import ChatTemplate
from epd.text.guarded_text import ControlTokenGuard
from services.router.calls import Conversation, Message, Tool


def require_tools(template: ChatTemplate, conversation: Conversation) -> None:
    """Checks that the template shows the model what the conversation has of tools.

    Raises:
        UnsupportedFeatureError: it would leave it out.
    """
    if template.takes_tools:
        return
    field = "tools" if conversation.tools else None
    if any(message.tool_calls or message.answers_call for message in conversation.messages):
        field = field or "messages"
    if field:
        raise UnsupportedFeatureError(
            "the model's chat template knows no tools",
            reason="TOOLS_NOT_SUPPORTED",
            metadata={"field": field},
        )


def tool_texts(conversation: Conversation) -> Iterator[str]:
    """What the client wrote in tools and calls, for the guard's choice of sentinels.

    JSON texts stand for the strings in them: a character is in one or spelled as an escape.
    """
    for tool in conversation.tools:
        yield json.dumps(json.loads(tool.definition), ensure_ascii=False)
    for message in conversation.messages:
        yield message.answers_call
        for call in message.tool_calls:
            yield call.call_id
            yield call.name
            yield json.dumps(json.loads(call.arguments), ensure_ascii=False)


def template_tools(tools: Sequence[Tool], guard: ControlTokenGuard) -> list[Any] | None:
    """The template's ``tools``; None without any."""
    return [
        {"type": "function", "function": _marked(json.loads(tool.definition), guard)}
        for tool in tools
    ] or None


def tool_fields(message: Message, guard: ControlTokenGuard) -> dict[str, Any]:
    """What a message has beside role and content."""
    fields: dict[str, Any] = {}
    if message.tool_calls:
        fields["tool_calls"] = [
            {
                "id": _marked(call.call_id, guard),
                "type": "function",
                "function": {
                    "name": _marked(call.name, guard),
                    # An object, as templates expect it, not OpenAI's text of one.
                    "arguments": _marked(json.loads(call.arguments), guard),
                },
            }
            for call in message.tool_calls
        ]
    if message.answers_call:
        fields["tool_call_id"] = _marked(message.answers_call, guard)
    return fields


def _marked(value: Any, guard: ControlTokenGuard) -> Any:
    """The value with control-token spellings marked in all of its strings, keys included."""
    match value:
        case str():
            return guard.mark([value])[0]
        case dict():
            return {guard.mark([key])[0]: _marked(item, guard) for key, item in value.items()}
        case list():
            return [_marked(item, guard) for item in value]
        case _:
            return value
