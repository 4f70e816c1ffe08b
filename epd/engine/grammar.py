"""Output that follows a JSON schema or a regular expression.

A matcher is a pure function of its grammar and of the tokens it has taken, so an answer that goes
on in another worker, or is replayed, is masked there as it would have been here.
"""

import threading
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
from llguidance import LLMatcher, LLTokenizer

if TYPE_CHECKING:
    from llguidance._lib import JsonCompileOptions

from epd.errors import InvalidRequestError, UnsupportedFeatureError
from epd.sampling import Constraint, ConstraintKind

#: One line, as models write JSON. Free white space would let a model write it for ever.
_JSON_LAYOUT: "JsonCompileOptions" = {
    "whitespace_flexible": False,
    "item_separator": ", ",
    "key_separator": ": ",
}
_FIELD = "sampling.constraint"
_WORD_BITS = 32


class Matcher:
    """The grammar of one answer and how far it has come. Used by one thread at a time."""

    def __init__(self, matcher: LLMatcher, vocab_size: int) -> None:
        self._matcher = matcher
        self._words = -(-vocab_size // _WORD_BITS)

    def take(self, token_ids: Sequence[int]) -> None:
        """Goes on over tokens of the output.

        Raises:
            InvalidRequestError: the grammar does not allow them, or is too complex to go on.
        """
        if not self._matcher.consume_tokens(list(token_ids)):
            raise InvalidRequestError(
                f"the output does not follow the grammar: {self._reason()}", field=_FIELD
            )

    def allowed(self) -> npt.NDArray[np.int32]:
        """A bit per token, lowest first, that says whether it may come next.

        Once the answer is complete only end tokens may.

        Raises:
            InvalidRequestError: the grammar is too complex to go on.
        """
        mask = np.zeros(self._words, dtype=np.int32)
        self._matcher.unsafe_compute_mask_ptr(mask.ctypes.data, mask.nbytes)
        if self._matcher.is_error() or not mask.any():
            raise InvalidRequestError(f"the grammar leads nowhere: {self._reason()}", field=_FIELD)
        return mask

    def _reason(self) -> str:
        lines = str(self._matcher.get_error()).splitlines()
        return lines[0] if lines else "no token may follow"


class GrammarCompiler:
    """Makes matchers for one model. Thread-safe; slow: not for an event loop or the engine thread.

    Args:
        folder: The model's, with ``tokenizer.json``.
        vocab_size: Width of the logits.
        end_token_ids: Tokens that may follow a complete answer.
    """

    def __init__(self, folder: Path, vocab_size: int, end_token_ids: frozenset[int]) -> None:
        self._file = folder / "tokenizer.json"
        self._vocab_size = vocab_size
        self._end_token_ids = end_token_ids
        self._tokenizer: LLTokenizer | None = None
        self._lock = threading.Lock()

    def compile(self, constraint: Constraint, emitted: Sequence[int]) -> Matcher:
        """A matcher that has gone on over the tokens that the answer has already.

        Raises:
            InvalidRequestError: the constraint is malformed, or the tokens do not follow it.
            UnsupportedFeatureError: the model cannot be constrained.
        """
        made = LLMatcher(self._shared_tokenizer(), _grammar(constraint), log_level=0)
        if made.is_error():
            reason = str(made.get_error()).splitlines()[0]
            raise InvalidRequestError(f"the grammar is malformed: {reason}", field=_FIELD)
        matcher = Matcher(made, self._vocab_size)
        if emitted:
            matcher.take(emitted)
        return matcher

    def _shared_tokenizer(self) -> LLTokenizer:
        """Made once, at the first constrained request: it takes up to a second."""
        with self._lock:
            if self._tokenizer is None:
                if not self._end_token_ids or not self._file.exists():
                    raise UnsupportedFeatureError(
                        "constrained output needs a model with end tokens and a tokenizer.json",
                        reason="CONSTRAINTS_UNSUPPORTED",
                    )
                self._tokenizer = LLTokenizer(
                    self._file.read_text(encoding="utf-8"),
                    n_vocab=self._vocab_size,
                    eos_token=sorted(self._end_token_ids),
                )
            return self._tokenizer


def _grammar(constraint: Constraint) -> str:
    if constraint.kind is ConstraintKind.REGEX:
        return LLMatcher.grammar_from_regex(constraint.text)
    try:
        return LLMatcher.grammar_from_json_schema(constraint.text, overrides=_JSON_LAYOUT)
    except ValueError as error:
        raise InvalidRequestError("the schema is no JSON", field=_FIELD) from error
