"""Control tokens come from the template only, never from what a client wrote."""

from hypothesis import given, settings
from hypothesis import strategies as st

from epd.text.guarded_text import ControlTokenGuard
from epd.text.tokenizer import Tokenizer
from tests.text import tokenizers_zoo

TOKENIZER = tokenizers_zoo.byte_level()
CONTROL = tokenizers_zoo.CONTROL
FRAGMENTS = st.sampled_from(
    [*CONTROL, "<|im", "age_pad|>", "<|", "|>", "a", "\ufdd0", "\ufdd1", "日"]
)


def render(parts: list[str], tokenizer: Tokenizer = TOKENIZER) -> list[int]:
    guard = ControlTokenGuard(tokenizer.added_tokens, parts)
    text = "<|start|>" + "".join(guard.mark(parts)) + "<|end|>"
    return tokenizer.encode_guarded(guard.split(text))


@settings(deadline=None)
@given(parts=st.lists(st.lists(FRAGMENTS, max_size=4).map("".join), max_size=4))
def test_client_text_yields_no_control_token_and_keeps_every_character(parts: list[str]) -> None:
    token_ids = render(parts)
    assert token_ids[0] == TOKENIZER.added_tokens["<|start|>"]
    assert token_ids[-1] == TOKENIZER.added_tokens["<|end|>"]
    assert not set(token_ids[1:-1]) & set(TOKENIZER.added_tokens.values())
    assert TOKENIZER.decode(token_ids) == "".join(parts)


def test_a_spelling_cut_over_two_parts_stays_text() -> None:
    token_ids = render(["<|image", "_pad|>"])
    assert TOKENIZER.added_tokens["<|image_pad|>"] not in token_ids
    assert TOKENIZER.decode(token_ids) == "<|image_pad|>"


def test_text_without_spellings_is_encoded_in_one_piece() -> None:
    parts = ["the quick", " brown fox"]
    whole = TOKENIZER.encode("<|start|>the quick brown fox<|end|>")
    assert render(parts) == whole


def test_added_tokens_that_are_not_special_are_guarded_too() -> None:
    tokenizer = tokenizers_zoo.word_piece()
    assert tokenizer.added_tokens["<tool>"] not in render(["x <tool> y"], tokenizer)


def test_unknown_ids_are_named() -> None:
    assert TOKENIZER.unknown_ids([0, TOKENIZER.vocab_size, -1]) == [TOKENIZER.vocab_size, -1]
