"""Text of a growing list of tokens, a piece at a time."""

from collections.abc import Sequence
from typing import Protocol

#: What decoders write for bytes that are no (or not yet a) character.
REPLACEMENT = "\ufffd"
#: A character has at most 4 bytes, so at most 3 tokens can wait for the one that completes it.
_MAX_UNFINISHED = 3
#: Beyond this many waiting tokens some of them are surely broken and are given out.
_MAX_WAITING = 8


class Decoder(Protocol):
    """What the detokeniser needs of a tokenizer."""

    special_ids: frozenset[int]

    def decode(self, token_ids: Sequence[int]) -> str:
        """Text of the tokens."""
        ...


class IncrementalDetokenizer:
    """Turns tokens into text as they come; the texts joined are the decoding of all tokens at once.

    Only whole characters leave: bytes of a character split over tokens wait for the last of them.
    Each decoding includes the tokens of the previous piece as context, because decoders treat the
    first token of a text in their own way (a leading space is dropped). Cost per token does not
    grow with the length of the text.
    """

    def __init__(self, decoder: Decoder) -> None:
        self._decoder = decoder
        self._context: list[int] = []
        self._waiting: list[int] = []

    def push(self, token_id: int) -> str:
        """Text that the token completes, often empty. Special tokens have none."""
        if token_id in self._decoder.special_ids:
            return ""
        self._waiting.append(token_id)
        text = self._text_of(self._waiting)
        if text and not text.endswith(REPLACEMENT):
            return self._take(len(self._waiting), text)
        if len(self._waiting) > _MAX_WAITING:
            return self._take_broken(text)
        return ""

    def flush(self) -> str:
        """Text of what still waits, at the end of the output."""
        return self._take(len(self._waiting), self._text_of(self._waiting))

    def _take_broken(self, text: str) -> str:
        """Gives out all but a possibly unfinished character at the end.

        A border between tokens lies between two characters when decoding the two sides apart gives
        the same as decoding them together; one of the last few borders always does, except with
        decoders that judge a whole run of bytes together.
        """
        count = len(self._waiting)
        for border in range(count - 1, count - 2 - _MAX_UNFINISHED, -1):
            left = self._text_of(self._waiting[:border])
            if left + self._text_of(self._waiting[border:]) == text:
                return self._take(border, left)
        return self._take(count, text)

    def _text_of(self, token_ids: list[int]) -> str:
        context = self._decoder.decode(self._context)
        text = self._decoder.decode(self._context + token_ids)
        if text.startswith(context):
            return text[len(context) :]
        # The decoder has rewritten the context (dropped a space before a comma): go on after what
        # both have in common, since the rest has been given out already.
        common = 0
        for before, after in zip(context, text, strict=False):
            if before != after:
                break
            common += 1
        return text[common:]

    def _take(self, count: int, text: str) -> str:
        if text:
            self._context = self._waiting[:count]
            self._waiting = self._waiting[count:]
        return text
