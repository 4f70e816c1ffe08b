"""Answers that are nothing but one tool call, because a grammar has allowed nothing else."""

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from epd.text.tool_output import CallArguments, CallBegun, SaidText, ToolPiece

#: The grammar writes JSON on one line, in exactly this layout.
_HEAD = re.compile(r'\{"name": ("(?:[^"\\]|\\.)*"), "arguments": ')


class NamedCall:
    """The whole answer is the arguments of one named tool.

    Args:
        name: Of the tool.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._begun = False

    def push(self, text: str) -> list[ToolPiece]:
        """See :class:`epd.text.tool_output.ToolOutput`."""
        if not text:
            return []
        begin: list[ToolPiece] = [] if self._begun else [CallBegun(self._name)]
        self._begun = True
        return [*begin, CallArguments(text)]

    def finish(self) -> list[ToolPiece]:
        """Nothing is held back."""
        return []


class AnyCall:
    """The whole answer is ``{"name": ..., "arguments": ...}``; the arguments are told as they come.

    An answer that was cut before its arguments is text.
    """

    def __init__(self) -> None:
        self._held = ""
        self._begun = False

    def push(self, text: str) -> list[ToolPiece]:
        """See :class:`epd.text.tool_output.ToolOutput`."""
        self._held += text
        pieces: list[ToolPiece] = []
        if not self._begun:
            head = _HEAD.match(self._held)
            if head is None:
                return []
            self._begun = True
            self._held = self._held[head.end() :]
            pieces.append(CallBegun(json.loads(head[1])))
        # The last character may be the brace that closes the whole.
        sure, self._held = self._held[:-1], self._held[-1:]
        if sure:
            pieces.append(CallArguments(sure))
        return pieces

    def finish(self) -> list[ToolPiece]:
        """See the protocol."""
        held, self._held = self._held, ""
        if not self._begun:
            return [SaidText(held)] if held else []
        return []


def any_call_schema(parameters: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """The JSON schema of an :class:`AnyCall`.

    Args:
        parameters: Schema of each tool's arguments by the tool's name. References inside one are to
            its own root, which lies deeper here: they are rewritten.
    """
    places = {name: f"#/$defs/tool{index}" for index, name in enumerate(parameters)}
    return {
        "$defs": {
            place.rpartition("/")[2]: _moved(parameters[name], place)
            for name, place in places.items()
        },
        "anyOf": [
            {
                "type": "object",
                "properties": {"name": {"const": name}, "arguments": {"$ref": place}},
                "required": ["name", "arguments"],
                "additionalProperties": False,
            }
            for name, place in places.items()
        ],
    }


def _moved(schema: Any, place: str) -> Any:
    """The schema with its references to ``#`` turned to ``place``."""
    if isinstance(schema, Mapping):
        return {
            key: place + value[1:]
            if key == "$ref" and isinstance(value, str) and value.startswith("#")
            else _moved(value, place)
            for key, value in schema.items()
        }
    if isinstance(schema, Sequence) and not isinstance(schema, str):
        return [_moved(item, place) for item in schema]
    return schema
