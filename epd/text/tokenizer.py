"""Text to token ids and back, from a model folder's ``tokenizer.json``."""

import json
from collections.abc import Iterable, Sequence
from pathlib import Path

from tokenizers import Tokenizer as HfTokenizer

from epd.errors import InvalidRequestError
from epd.text.guarded_text import GuardedText
from epd.text.token_bytes import TokenBytes


class Tokenizer:
    """The model's tokenizer. Thread-safe: nothing in it changes after construction.

    There are two readings of a text. *Trusted* text (the chat template's) turns spellings such as
    ``<|image_pad|>`` into their control tokens. *Untrusted* text (the client's) never does: there
    the spelling is ordinary characters.
    """

    def __init__(self, definition: str) -> None:
        self._trusted = HfTokenizer.from_str(definition)
        self._trusted.no_truncation()
        self._trusted.no_padding()
        self._plain = _without_added_tokens(definition)
        added = self._trusted.get_added_tokens_decoder()
        #: Spellings that trusted text turns into one control token each.
        self.added_tokens = {token.content: token_id for token_id, token in added.items()}
        #: Ids that are left out of decoded text.
        self.special_ids = frozenset(token_id for token_id, token in added.items() if token.special)
        vocabulary = self._trusted.get_vocab(with_added_tokens=True)
        self.vocab_size = max(vocabulary.values()) + 1
        self.token_bytes = TokenBytes(definition, vocabulary)

    @classmethod
    def from_folder(cls, folder: Path) -> "Tokenizer":
        """Reads ``tokenizer.json``.

        Raises:
            FileNotFoundError: the folder has none.
        """
        return cls((folder / "tokenizer.json").read_text(encoding="utf-8"))

    def encode(self, text: str, *, add_special_tokens: bool = False) -> list[int]:
        """Ids of trusted text; ``add_special_tokens`` adds what the model begins a text with."""
        return list(self._trusted.encode(text, add_special_tokens=add_special_tokens).ids)

    def encode_guarded(self, text: GuardedText, *, add_special_tokens: bool = False) -> list[int]:
        """Ids of a text in which the client's spellings of control tokens are marked.

        Without such spellings the whole text is encoded in one piece, exactly as ``encode`` does.

        Raises:
            InvalidRequestError: the tokenizer cannot spell a control token's text otherwise.
        """
        ids: list[int] = []
        for index, piece in enumerate(text.pieces):
            if piece.is_plain:
                ids += self._encode_plain(piece.text)
            else:
                ids += self.encode(piece.text, add_special_tokens=add_special_tokens and not index)
        return ids

    def decode(self, token_ids: Sequence[int]) -> str:
        """Text of the tokens, special ones left out."""
        return str(self._trusted.decode(list(token_ids), skip_special_tokens=True))

    def unknown_ids(self, token_ids: Iterable[int]) -> list[int]:
        """Those of the ids that are outside the vocabulary."""
        return [token_id for token_id in token_ids if not 0 <= token_id < self.vocab_size]

    def _encode_plain(self, text: str) -> list[int]:
        ids = list(self._plain.encode(text, add_special_tokens=False).ids)
        if self.added_tokens.get(text) in ids:
            raise InvalidRequestError(
                f"the text contains {text!r}, which is a control token of this model",
                field="input",
                reason="CONTROL_TOKEN_IN_TEXT",
            )
        return ids


def _without_added_tokens(definition: str) -> HfTokenizer:
    data = json.loads(definition)
    data["added_tokens"] = []
    data["post_processor"] = None
    return HfTokenizer.from_str(json.dumps(data))
