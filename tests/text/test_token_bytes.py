"""Single tokens' bytes add up to the text."""

import pytest

from epd.text.tokenizer import Tokenizer
from tests.text import tokenizers_zoo

TEXT = "def f(x): naïve 数 🙂"


@pytest.mark.parametrize(
    "make", [tokenizers_zoo.byte_level, tokenizers_zoo.sentencepiece_with_byte_fallback]
)
def test_bytes_of_all_tokens_joined_are_the_text(make) -> None:
    tokenizer: Tokenizer = make()
    joined = b"".join(tokenizer.token_bytes.of(token) for token in tokenizer.encode(TEXT))
    assert joined.decode().strip() == TEXT


def test_added_tokens_are_their_spelling_and_unknown_ones_nothing() -> None:
    tokenizer: Tokenizer = tokenizers_zoo.byte_level()
    for spelling, token_id in tokenizer.added_tokens.items():
        assert tokenizer.token_bytes.of(token_id).decode() == spelling
    assert tokenizer.token_bytes.of(10**6) == b""
