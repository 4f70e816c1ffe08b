"""Tool calls as Llama 3 models write them: ``{"name": ..., "parameters": ...}`` and no more."""

import json
from collections.abc import Collection

from epd.text.tool_output import CallArguments, CallBegun, SaidText, ToolPiece


class LlamaCalls:
    """Tells an answer that is one call from an answer that is text.

    An answer that begins with a brace is held back to its end; if it is no JSON object with the
    name of an offered tool, it is text.

    Args:
        names: Of the offered tools.
    """

    #: An answer has one call at most, so nothing has to end it.
    end_of_call = ""

    def __init__(self, names: Collection[str]) -> None:
        self._names = frozenset(names)
        self._held: list[str] = []
        #: Known with the first character that is not white space.
        self._is_text: bool | None = None

    def push(self, text: str) -> list[ToolPiece]:
        """See :class:`epd.text.tool_output.ToolOutput`."""
        self._held.append(text)
        if self._is_text is None and text.strip():
            self._is_text = not text.lstrip().startswith("{")
        return self._as_text() if self._is_text else []

    def finish(self) -> list[ToolPiece]:
        """See the protocol."""
        try:
            found = json.loads("".join(self._held))
        except (ValueError, RecursionError):
            return self._as_text()
        name = found.get("name") if isinstance(found, dict) else None
        arguments = found.get("parameters", {}) if name else None
        if not isinstance(name, str) or name not in self._names or not isinstance(arguments, dict):
            return self._as_text()
        text = json.dumps(arguments, ensure_ascii=False)
        return [CallBegun(name), CallArguments(text)]

    def _as_text(self) -> list[ToolPiece]:
        held, self._held = "".join(self._held), []
        return [SaidText(held)] if held else []
