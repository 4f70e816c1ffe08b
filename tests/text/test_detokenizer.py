"""Joined pieces equal the decoding of everything, for every kind of decoder."""

from functools import cache

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from epd.text.detokenizer import REPLACEMENT, IncrementalDetokenizer
from epd.text.tokenizer import Tokenizer
from tests.text import tokenizers_zoo

KINDS = {
    "byte-level": cache(tokenizers_zoo.byte_level),
    "byte-fallback": cache(tokenizers_zoo.sentencepiece_with_byte_fallback),
    "metaspace": cache(tokenizers_zoo.metaspace),
    "word-piece": cache(tokenizers_zoo.word_piece),
}


def pieces_of(tokenizer: Tokenizer, token_ids: list[int]) -> list[str]:
    detokenizer = IncrementalDetokenizer(tokenizer)
    return [*(detokenizer.push(token_id) for token_id in token_ids), detokenizer.flush()]


@pytest.mark.parametrize("kind", KINDS)
@settings(deadline=None, max_examples=150)
@given(text=st.text(max_size=60))
def test_pieces_joined_equal_decoding_all_tokens_of_any_text(kind: str, text: str) -> None:
    tokenizer = KINDS[kind]()
    token_ids = tokenizer.encode(text)
    assert "".join(pieces_of(tokenizer, token_ids)) == tokenizer.decode(token_ids)


@settings(deadline=None, max_examples=300)
@given(seed=st.lists(st.integers(0, 10_000), max_size=60))
def test_pieces_joined_equal_decoding_any_tokens_even_broken_bytes(seed: list[int]) -> None:
    tokenizer = KINDS["byte-level"]()
    token_ids = [number % tokenizer.vocab_size for number in seed]
    assert "".join(pieces_of(tokenizer, token_ids)) == tokenizer.decode(token_ids)


@settings(deadline=None, max_examples=300)
@given(data=st.binary(max_size=60))
def test_pieces_joined_equal_decoding_any_bytes(data: bytes) -> None:
    """Only byte tokens, so that characters are cut everywhere and many are broken."""
    tokenizer = KINDS["byte-level"]()
    alphabet = {value: ids[0] for value, ids in _single_bytes(tokenizer).items()}
    token_ids = [alphabet[value] for value in data]
    assert "".join(pieces_of(tokenizer, token_ids)) == data.decode("utf-8", "replace")


@pytest.mark.parametrize("kind", ["byte-level", "byte-fallback"])
def test_a_character_leaves_only_when_its_last_token_has_come(kind: str) -> None:
    tokenizer = KINDS[kind]()
    token_ids = tokenizer.encode("🦊")
    pieces = pieces_of(tokenizer, token_ids)
    assert len(token_ids) >= 3
    assert [piece for piece in pieces if piece] == ["🦊"]


def test_a_leading_space_between_pieces_survives_a_decoder_that_strips_it() -> None:
    tokenizer = KINDS["byte-fallback"]()
    pieces = pieces_of(tokenizer, tokenizer.encode("the dog the fox"))
    assert "".join(pieces) == "the dog the fox"


def test_special_tokens_have_no_text() -> None:
    tokenizer = KINDS["byte-level"]()
    token_ids = tokenizer.encode("<|start|>dog<|end|>")
    assert token_ids[0] in tokenizer.special_ids
    assert "".join(pieces_of(tokenizer, token_ids)) == "dog"


def test_an_unfinished_character_at_the_end_is_shown_as_one_replacement() -> None:
    tokenizer = KINDS["byte-level"]()
    token_ids = tokenizer.encode("a🦊")[:-1]
    assert "".join(pieces_of(tokenizer, token_ids)) == "a" + REPLACEMENT


def test_broken_bytes_do_not_make_the_detokeniser_wait_for_ever() -> None:
    tokenizer = KINDS["byte-level"]()
    broken = _single_bytes(tokenizer)[0xFF][0]
    detokenizer = IncrementalDetokenizer(tokenizer)
    text = "".join(detokenizer.push(broken) for _ in range(1000))
    assert len(text) > 980


def _single_bytes(tokenizer: Tokenizer) -> dict[int, list[int]]:
    """Ids of the tokens of one byte each: the byte-level alphabet maps each byte to a character."""
    from tokenizers.pre_tokenizers import ByteLevel

    found: dict[int, list[int]] = {}
    vocab = {tokenizer._trusted.id_to_token(i): i for i in range(tokenizer.vocab_size)}
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [value for value in range(256) if value not in printable]
    spelled = {value: chr(value) for value in printable}
    spelled |= {value: chr(256 + index) for index, value in enumerate(others)}
    assert set(spelled.values()) == set(ByteLevel.alphabet())
    for value, character in spelled.items():
        found[value] = [vocab[character]]
    return found
