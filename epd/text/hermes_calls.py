"""Tool calls as Hermes and Qwen write them: JSON between ``<tool_call>`` and ``</tool_call>``."""

from collections.abc import Collection

from epd.text.tool_output import SaidText, ToolPiece, partial_at_end, written_call

_START = "<tool_call>"
_END = "</tool_call>"


class HermesCalls:
    """Finds calls in free text.

    A call is told whole, once its end tag has come. A block that is no JSON object with the name of
    an offered tool is text, tags included. White space before a call, and at the end of an answer
    with calls, is layout and left out.

    Args:
        names: Of the offered tools.
    """

    #: A stop string with which an answer ends after its first call.
    end_of_call = _END

    def __init__(self, names: Collection[str]) -> None:
        self._names = frozenset(names)
        self._held = ""
        self._in_call = False
        self._called = False
        #: White space before the call.
        self._gap = ""
        #: Where the search for the end tag goes on: what lies before has been searched.
        self._searched = 0

    def push(self, text: str) -> list[ToolPiece]:
        """See :class:`epd.text.tool_output.ToolOutput`."""
        self._held += text
        pieces: list[ToolPiece] = []
        while self._step(pieces):
            pass
        return pieces

    def finish(self) -> list[ToolPiece]:
        """See the protocol. A call whose end tag is missing counts if its JSON is complete."""
        held, self._held = self._held, ""
        if self._in_call:
            return self._ended(held, end_tag="")
        return [SaidText(held)] if held.strip() or (held and not self._called) else []

    def _step(self, pieces: list[ToolPiece]) -> bool:
        """Takes text up to the next tag; False when that tag has not come."""
        if self._in_call:
            end = self._held.find(_END, self._searched)
            if end < 0:
                self._searched = max(0, len(self._held) - len(_END) + 1)
                return False
            block, self._held = self._held[:end], self._held[end + len(_END) :]
            pieces += self._ended(block, _END)
            return True
        start = self._held.find(_START)
        # White space before a tag that may still come is held back with it.
        before = self._held[:start] if start >= 0 else self._without_partial_tag()
        sure = before.rstrip()
        if start >= 0:
            self._gap = before[len(sure) :]
            self._held = self._held[start + len(_START) :]
            self._in_call = True
        else:
            self._held = self._held[len(sure) :]
        if sure:
            pieces.append(SaidText(sure))
        return self._in_call

    def _without_partial_tag(self) -> str:
        return self._held[: len(self._held) - partial_at_end(self._held, _START)]

    def _ended(self, block: str, end_tag: str) -> list[ToolPiece]:
        """The end of a block: a call, or text after all."""
        self._in_call, self._searched = False, 0
        call = written_call(block, self._names, "arguments")
        self._called = self._called or bool(call)
        return call or [SaidText(self._gap + _START + block + end_tag)]
