"""Training rows: pictures with several questions about them, as token sequences.

All questions of a row share its picture tokens, but normally do not see each other: every
question block starts at the position right after the pictures, and an attention mask hides the
other blocks.  To the model this is exactly a single-turn chat, at a fraction of the cost.  A few
rows are real chats instead, in which later turns see the earlier ones.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import lru_cache

import numpy as np
from transformers import PreTrainedTokenizerFast

from .model import MERGE_SIZE
from .pool import Picture
from .questions import Turn
from .tokenizer import IM_END, IM_START, IMAGE_PAD, VISION_END, VISION_START, token_id

SHARED_BLOCK = 0
_SYSTEM_SHARE = 0.1
_SYSTEM_PROMPTS = (
    "You are a helpful assistant.",
    "Answer the question.",
    "You answer questions about pictures. Be brief.",
)


@dataclass
class Row:
    """One sequence; ``blocks`` says which tokens may see each other (see the module text)."""

    ids: list[int] = field(default_factory=list)
    positions: list[tuple[int, int, int]] = field(default_factory=list)
    blocks: list[int] = field(default_factory=list)
    weights: list[float] = field(default_factory=list)  # of predicting this token; 0 in prompts
    image_starts: list[int] = field(default_factory=list)  # first token of every picture
    answer_kinds: list[str] = field(default_factory=list)  # kind of question of every answer
    answer_lengths: list[int] = field(default_factory=list)
    next_position: int = 0

    def add_text(self, ids: list[int], block: int, weight: float = 0.0) -> None:
        """Append text tokens, whose three mrope positions are the same."""
        for token in ids:
            self.ids.append(token)
            self.positions.append((self.next_position,) * 3)
            self.blocks.append(block)
            self.weights.append(weight)
            self.next_position += 1

    def add_image(self, token: int, grid: tuple[int, int], block: int) -> None:
        """Append the placeholders of one picture, positioned in rows and columns."""
        rows, columns = grid[0] // MERGE_SIZE, grid[1] // MERGE_SIZE
        start = self.next_position
        self.image_starts.append(len(self.ids))
        for row in range(rows):
            for column in range(columns):
                self.ids.append(token)
                self.positions.append((start, start + row, start + column))
                self.blocks.append(block)
                self.weights.append(0.0)
        self.next_position = start + max(rows, columns)


class RowWriter:
    """Writes rows with the chat template's tokens."""

    def __init__(self, tokenizer: PreTrainedTokenizerFast) -> None:
        def token(text: str) -> int:
            return token_id(tokenizer, text)

        @lru_cache(maxsize=100_000)
        def encode(text: str) -> tuple[int, ...]:
            return tuple(tokenizer.encode(text, add_special_tokens=False))

        self._encode = encode
        self._image = token(IMAGE_PAD)
        self._vision_start = token(VISION_START)
        self._vision_end = token(VISION_END)
        self._end = token(IM_END)
        self._user = [token(IM_START), *encode("user\n")]
        self._assistant = [token(IM_END), *encode("\n"), token(IM_START), *encode("assistant\n")]
        self._system = [token(IM_START), *encode("system\n")]
        self._newline = list(encode("\n"))

    def independent(
        self, rng: np.random.Generator, pictures: list[Picture], turns: list[Turn]
    ) -> Row:
        """Questions after the pictures, blind to each other."""
        row = Row()
        self._opening(rng, row)
        self._pictures(row, pictures)
        start = row.next_position
        for block, turn in enumerate(turns, 1):
            row.next_position = start
            self._turn(row, turn, block)
        return row

    def chat(self, rng: np.random.Generator, pictures: list[Picture], turns: list[Turn]) -> Row:
        """Questions after the pictures, as one conversation."""
        row = Row()
        self._opening(rng, row)
        self._pictures(row, pictures)
        for index, turn in enumerate(turns):
            if index:
                row.add_text([*self._newline, *self._user], SHARED_BLOCK)
            self._turn(row, turn, SHARED_BLOCK)
        return row

    def text_first(self, rng: np.random.Generator, pictures: list[Picture], turn: Turn) -> Row:
        """The question before the pictures, as many clients send it."""
        row = Row()
        self._opening(rng, row)
        row.add_text(list(self._encode(turn.question)), SHARED_BLOCK)
        self._pictures(row, pictures)
        self._answer(row, turn, SHARED_BLOCK)
        return row

    def _opening(self, rng: np.random.Generator, row: Row) -> None:
        if rng.random() < _SYSTEM_SHARE:
            prompt = _SYSTEM_PROMPTS[rng.integers(len(_SYSTEM_PROMPTS))]
            tokens = [*self._system, *self._encode(prompt), self._end, *self._newline]
            row.add_text(tokens, SHARED_BLOCK)
        row.add_text(self._user, SHARED_BLOCK)

    def _pictures(self, row: Row, pictures: list[Picture]) -> None:
        for picture in pictures:
            row.add_text([self._vision_start], SHARED_BLOCK)
            row.add_image(self._image, picture.grid, SHARED_BLOCK)
            row.add_text([self._vision_end], SHARED_BLOCK)

    def _turn(self, row: Row, turn: Turn, block: int) -> None:
        row.add_text(list(self._encode(turn.question)), block)
        self._answer(row, turn, block)

    def _answer(self, row: Row, turn: Turn, block: int) -> None:
        row.add_text(self._assistant, block)
        answer = [*self._encode(turn.answer), self._end]
        # Between "every answer counts the same" and "every token counts the same".
        row.add_text(answer, block, weight=len(answer) ** -0.5)
        row.answer_kinds.append(turn.kind)
        row.answer_lengths.append(len(answer))
