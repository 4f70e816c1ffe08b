"""Stop strings end the text at the same place however it is cut."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from epd.text.stop_strings import StopStringScanner

ABC = st.text(alphabet="abc", max_size=30)
STOPS = st.lists(st.text(alphabet="abc", min_size=1, max_size=5), max_size=4)


def scan(stops: list[str], pieces: list[str]) -> tuple[str, bool]:
    scanner = StopStringScanner(stops)
    sent = ""
    for piece in pieces:
        result = scanner.push(piece)
        sent += result.text
        if result.stopped:
            return sent, True
    return sent + scanner.flush(), False


def plain(stops: list[str], text: str) -> tuple[str, bool]:
    """The definition: the first position at which some stop string is complete."""
    for end in range(len(text) + 1):
        complete = [stop for stop in stops if text[:end].endswith(stop)]
        if complete:
            return text[: end - max(map(len, complete))], True
    return text, False


@given(stops=STOPS, text=ABC, cuts=st.lists(st.integers(0, 30), max_size=10))
def test_the_result_is_the_first_completed_stop_string_for_any_cut(
    stops: list[str], text: str, cuts: list[int]
) -> None:
    borders = [0, *sorted(min(cut, len(text)) for cut in cuts), len(text)]
    pieces = [text[a:b] for a, b in pairwise(borders)]
    assert scan(stops, pieces) == plain(stops, text)


def test_the_beginning_of_a_stop_string_is_held_back_until_it_is_known_to_be_none() -> None:
    scanner = StopStringScanner(["\n\nUser:"])
    assert scanner.push("fine\n").text == "fine"
    assert scanner.push("\nUs").text == ""
    assert scanner.push("ual").text == "\n\nUsual"


def test_without_stop_strings_nothing_is_held_back() -> None:
    assert StopStringScanner([]).push("abc").text == "abc"


def test_the_stop_string_itself_is_not_sent() -> None:
    assert scan(["END"], ["the E", "ND and more"]) == ("the ", True)


def test_an_empty_stop_string_is_a_bug_of_the_caller() -> None:
    with pytest.raises(AssertionError):
        StopStringScanner([""])
