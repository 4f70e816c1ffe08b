"""Marks control-token spellings in a client's text, so that they stay text after rendering.

A chat template joins its own control tokens with what the client wrote. Once joined, nobody can
tell ``<|image_pad|>`` of the template from ``<|image_pad|>`` typed by a user. So each spelling in
the client's strings is put between two sentinel characters before rendering. The sentinels are
Unicode noncharacters that this very request does not use; nothing of the client's text is lost.
"""

import re
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

from epd.errors import InvalidRequestError

_SENTINELS = [chr(point) for point in range(0xFDD0, 0xFDF0)]


@dataclass(frozen=True)
class TextPiece:
    """A stretch of text; in a plain one no control token may be read."""

    text: str
    is_plain: bool


@dataclass(frozen=True)
class GuardedText:
    """Text in pieces, in order. The pieces' texts joined are the text."""

    pieces: tuple[TextPiece, ...]

    def __str__(self) -> str:
        return "".join(piece.text for piece in self.pieces)


class ControlTokenGuard:
    """Marks and finds control-token spellings within one request's strings.

    Args:
        spellings: Texts of the tokenizer's added tokens.
        strings: Everything the client wrote; decides which sentinels are free.

    Raises:
        InvalidRequestError: the strings use up all sentinels.
    """

    def __init__(self, spellings: Collection[str], strings: Iterable[str]) -> None:
        used = set("".join(strings))
        free = [sentinel for sentinel in _SENTINELS if sentinel not in used][:2]
        if len(free) < 2:
            raise InvalidRequestError(
                "the text uses too many of the noncharacters U+FDD0 to U+FDEF", field="input"
            )
        self._start, self._end = free
        # Longest first: a spelling wins over one that it contains.
        longest_first = sorted(filter(None, spellings), key=len, reverse=True)
        pattern = "|".join(map(re.escape, longest_first)) or "(?!)"
        self._spelling = re.compile(pattern)
        self._marked = re.compile(f"{self._start}({pattern}){self._end}|[{self._start}{self._end}]")

    def mark(self, parts: Sequence[str]) -> list[str]:
        """The parts, which a template may join without anything between, with spellings marked.

        A spelling that lies across two parts gets a sentinel where the parts meet: that breaks it.
        """
        borders = set()
        position = 0
        for part in parts:
            position += len(part)
            borders.add(position)
        spans = [match.span() for match in self._spelling.finditer("".join(parts))]
        crossed = {
            border for border in borders if any(start < border < end for start, end in spans)
        }
        marked = []
        position = 0
        for part in parts:
            position += len(part)
            text = self._spelling.sub(f"{self._start}\\g<0>{self._end}", part)
            marked.append(text + self._end if position in crossed else text)
        return marked

    def split(self, rendered: str) -> GuardedText:
        """The rendered text with its plain pieces; lone sentinels only separate pieces."""
        # re.split gives text, spelling or None, text, spelling or None, ..., text.
        pieces = self._marked.split(rendered)
        return GuardedText(
            tuple(
                TextPiece(text, is_plain=index % 2 == 1)
                for index, text in enumerate(pieces)
                if text
            )
        )
