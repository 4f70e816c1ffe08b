"""Tool calls as Llama 3 models write them: ``{"name": ..., "parameters": ...}`` and no more."""

from collections.abc import Collection

from epd.text.tool_output import SaidText, ToolPiece, written_call


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
        return written_call("".join(self._held), self._names, "parameters") or self._as_text()

    def _as_text(self) -> list[ToolPiece]:
        held, self._held = "".join(self._held), []
        return [SaidText(held)] if held else []
