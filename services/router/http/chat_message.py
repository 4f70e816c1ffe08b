"""The fields of an assistant's message, whole or in pieces: text, and calls of tools."""

import secrets
from collections.abc import Iterable
from typing import Any

from epd.sampling import FinishReason
from epd.text.tool_output import CallArguments, CallBegun, SaidText, ToolOutput, ToolPiece
from services.router.calls import Delta


class MessageWriter:
    """Writes one choice's message.

    Args:
        output: Takes the answer apart; None where it is text.
    """

    def __init__(self, output: ToolOutput | None) -> None:
        self._output = output
        self._calls = 0

    def more(self, delta: Delta) -> dict[str, Any]:
        """The fields of a chunk's delta for new text; empty when none of it is certain yet."""
        if self._output is None:
            return {"content": delta.text}
        return self._fields(self._output.push(delta.text))

    def rest(self) -> dict[str, Any]:
        """The fields of the last chunk's delta."""
        return {} if self._output is None else self._fields(self._output.finish())

    def whole(self, text: str) -> dict[str, Any]:
        """The fields of a whole message."""
        if self._output is None:
            return {"content": text}
        fields = self._fields([*self._output.push(text), *self._output.finish()])
        for call in fields.get("tool_calls", ()):
            del call["index"]  # only pieces of calls have one
        return {"content": None if "tool_calls" in fields else "", **fields}

    def finish_reason(self, reason: FinishReason) -> str:
        """Why the choice has ended. A call that was cut short has not been made."""
        return "tool_calls" if self._calls and reason is FinishReason.STOP else reason.value

    def _fields(self, pieces: Iterable[ToolPiece]) -> dict[str, Any]:
        said: list[str] = []
        calls: list[dict[str, Any]] = []
        for piece in pieces:
            match piece:
                case SaidText(text):
                    said.append(text)
                case CallBegun(name):
                    calls.append(self._begin(name))
                case CallArguments(text):
                    if not calls:  # the call began in an earlier chunk
                        calls.append({"index": self._calls - 1, "function": {"arguments": ""}})
                    calls[-1]["function"]["arguments"] += text
        fields: dict[str, Any] = {}
        if said:
            fields["content"] = "".join(said)
        if calls:
            fields["tool_calls"] = calls
        return fields

    def _begin(self, name: str) -> dict[str, Any]:
        self._calls += 1
        return {
            "index": self._calls - 1,
            "id": f"call_{secrets.token_hex(12)}",
            "type": "function",
            "function": {"name": name, "arguments": ""},
        }
