"""The fields of a chat request that are about tools."""

import json
from typing import Any

from epd.errors import InvalidRequestError, UnsupportedFeatureError
from epd.text.call_parsers import CALL_PARSERS
from services.router.calls import Tool, ToolCall
from services.router.http.fields import Fields
from services.router.http.strict_json import read_json
from services.router.http.tool_use import ToolUse

#: Deeper JSON than any schema needs; what reads it later goes down by recursion.
_MAX_DEPTH = 64
_CHOICES = ("none", "auto", "required")


def read_tool_use(fields: Fields, parser: str) -> ToolUse:
    """Takes ``tools`` and ``tool_choice``.

    Args:
        fields: Of the request.
        parser: What reads answers with free calls.

    Raises:
        InvalidRequestError: a field has no valid value.
        UnsupportedFeatureError: a kind of tool or of choice that is not supported.
    """
    tools: dict[str, Tool] = {}
    strict_at = ""
    for item in fields.objects("tools"):
        tool, strict = _tool(item)
        if tool.name in tools:
            raise InvalidRequestError(f"two tools are named {tool.name!r}", field=item.path)
        tools[tool.name] = tool
        strict_at = strict_at or (f"{item.path}.function.strict" if strict else "")
    choice, named = _choice(fields, tools)
    if strict_at and choice == "auto":
        raise UnsupportedFeatureError(
            f"{strict_at} needs a tool_choice that forces the call",
            reason="UNSUPPORTED_VALUE",
            metadata={"field": strict_at},
        )
    # With none the model is not told of the tools, so that it has no reason to call one.
    told = () if choice == "none" else tuple(tools.values())
    return ToolUse(told, choice, named, parser)


def read_stop_after_call(fields: Fields, use: ToolUse) -> tuple[str, ...]:
    """Takes ``parallel_tool_calls``: the stop strings that end an answer after its first call."""
    parallel = fields.flag("parallel_tool_calls", default=True)
    if parallel or use.choice != "auto":  # a forced call is the only one
        return ()
    end = CALL_PARSERS[use.parser]([]).end_of_call
    return (end,) if end else ()


def read_tool_calls(message: Fields) -> tuple[ToolCall, ...]:
    """Takes an assistant message's ``tool_calls``.

    Raises:
        InvalidRequestError: a field has no valid value.
    """
    return tuple(map(_call, message.objects("tool_calls")))


def _tool(fields: Fields) -> tuple[Tool, bool]:
    """A tool, and whether its arguments shall follow its schema exactly."""
    function = _function(fields)
    name = function.required_text("name")
    definition: dict[str, Any] = {"name": name}
    description = function.text("description")
    if description is not None:
        definition["description"] = description
    parameters = function.take("parameters")
    if parameters is not None:
        path = function.name("parameters")
        Fields(parameters, path)  # refuses what is no object
        _check_depth(parameters, path)
        definition["parameters"] = parameters
    strict = function.flag("strict")
    function.finish()
    return Tool(name, json.dumps(definition, ensure_ascii=False)), strict


def _function(fields: Fields) -> Fields:
    kind = fields.required_text("type")
    if kind != "function":
        raise UnsupportedFeatureError(
            f"{kind[:32]!r} is not supported, function is",
            reason="UNSUPPORTED_VALUE",
            metadata={"field": fields.name("type")},
        )
    function = fields.object("function")
    if function is None:
        raise InvalidRequestError("missing", field=fields.name("function"), reason="MISSING_FIELD")
    fields.finish()
    return function


def _choice(fields: Fields, tools: dict[str, Tool]) -> tuple[str, str]:
    value = fields.take("tool_choice")
    if value is None:
        return ("auto" if tools else "none"), ""
    if value == "none":
        return "none", ""
    if not tools:
        raise InvalidRequestError("needs tools", field="tool_choice")
    if isinstance(value, str):
        if value not in _CHOICES:
            raise InvalidRequestError(f"expected one of {_CHOICES}", field="tool_choice")
        return value, ""
    function = _function(Fields(value, "tool_choice"))
    name = function.required_text("name")
    function.finish()
    if name not in tools:
        raise InvalidRequestError(f"no tool is named {name!r}", field=function.name("name"))
    return "named", name


def _call(fields: Fields) -> ToolCall:
    call_id = fields.required_text("id")
    function = _function(fields)
    name, arguments = function.required_text("name"), function.required_text("arguments")
    path = function.name("arguments")
    try:
        found = read_json(arguments)
    except ValueError:
        found = None
    if not isinstance(found, dict):
        raise InvalidRequestError("expected the JSON text of an object", field=path)
    _check_depth(found, path)
    function.finish()
    return ToolCall(call_id, name, arguments)


def _check_depth(value: Any, path: str) -> None:
    level = [value]
    for _ in range(_MAX_DEPTH):
        level = [
            item
            for outer in level
            if isinstance(outer, dict | list)
            for item in (outer.values() if isinstance(outer, dict) else outer)
        ]
        if not level:
            return
    raise InvalidRequestError(f"nested deeper than {_MAX_DEPTH} levels", field=path)
