"""The bytes that single tokens stand for."""

import json
import re
from collections.abc import Mapping
from typing import Any

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")
#: SentencePiece's mark for a space.
_SPACE = "▁"


class TokenBytes:
    """Bytes by token id, for clients that want to see each token by itself.

    A character may be split over tokens, so a single token's text need not exist; its bytes do.

    Args:
        definition: Text of ``tokenizer.json``.
        vocabulary: Spelling of every token, added ones included.
    """

    def __init__(self, definition: str, vocabulary: Mapping[str, int]) -> None:
        data = json.loads(definition)
        self._added = {token["id"]: token["content"] for token in data.get("added_tokens", ())}
        self._spellings = {token_id: spelling for spelling, token_id in vocabulary.items()}
        self._byte_of = _byte_level_alphabet() if _is_byte_level(data.get("decoder")) else None

    def of(self, token_id: int) -> bytes:
        """The token's bytes; an added token's are its spelling's, an unknown one has none."""
        if token_id in self._added:
            return str(self._added[token_id]).encode()
        spelling = self._spellings.get(token_id, "")
        if self._byte_of is not None and all(char in self._byte_of for char in spelling):
            return bytes(self._byte_of[char] for char in spelling)
        byte = _BYTE_TOKEN.fullmatch(spelling)
        if byte:
            return bytes([int(byte[1], 16)])
        return spelling.replace(_SPACE, " ").encode()


def _is_byte_level(decoder: Any) -> bool:
    if not isinstance(decoder, dict):
        return False
    parts = decoder.get("decoders", ()) if decoder.get("type") == "Sequence" else (decoder,)
    return any(part.get("type") == "ByteLevel" for part in parts)


def _byte_level_alphabet() -> dict[str, int]:
    """The character that byte-level tokenizers write for each byte, reversed.

    Printable bytes stand for themselves, the others for the characters from U+0100 on.
    """
    printable = {*range(33, 127), *range(161, 173), *range(174, 256)}
    hidden = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {
        chr(256 + index): byte for index, byte in enumerate(hidden)
    }
