"""What the router knows of prefix caches, and what it makes of popular prefixes."""

import pytest

from services.router.held_blocks import EventGapError, HeldBlocks
from services.router.popular_prefixes import PopularPrefixes


class Clock:
    """Time that passes on demand."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def chain(*names: str) -> list[bytes]:
    return [name.encode() for name in names]


def test_what_a_worker_tells_is_known_until_it_is_removed() -> None:
    held = HeldBlocks(100, bridge_s=1, assumed_s=120)
    held.apply(7, chain("a", "b", "c"), (), cleared=True)
    assert held.leading(chain("a", "b", "x")) == 2
    held.apply(8, (), chain("b"), cleared=False)
    assert held.leading(chain("a", "b", "c")) == 1
    held.apply(9, chain("z"), (), cleared=True)
    assert held.leading(chain("a")) == 0


def test_a_long_change_comes_in_parts() -> None:
    held = HeldBlocks(100, bridge_s=1, assumed_s=120)
    held.apply(3, chain("a"), (), cleared=True)
    held.apply(3, chain("b"), (), cleared=False)
    assert held.leading(chain("a", "b")) == 2


@pytest.mark.parametrize("sequence", [1, 5, 6, 9])
def test_a_gap_voids_the_view_until_a_full_list_comes(sequence: int) -> None:
    held = HeldBlocks(100, bridge_s=1, assumed_s=120)
    held.apply(3, chain("a"), (), cleared=True)
    with pytest.raises(EventGapError):
        held.apply(sequence, chain("b"), (), cleared=False)
    assert not held.is_told
    assert held.leading(chain("a")) == 0
    held.apply(sequence, chain("a", "b"), (), cleared=True)
    assert held.leading(chain("a", "b")) == 2


@pytest.mark.parametrize(("told", "lasts_s"), [(True, 1.0), (False, 120.0)])
def test_what_was_sent_counts_for_a_while(told: bool, lasts_s: float) -> None:
    clock = Clock()
    held = HeldBlocks(100, bridge_s=1, assumed_s=120, clock=clock)
    if told:
        held.apply(1, (), (), cleared=True)
    held.assume(chain("a", "b"))
    clock.now += lasts_s - 0.1
    assert held.leading(chain("a", "b", "c")) == 2
    clock.now += 0.2
    assert held.leading(chain("a", "b")) == 0


def test_memory_is_bounded_whatever_comes() -> None:
    held = HeldBlocks(50, bridge_s=1, assumed_s=120)
    held.apply(0, (), (), cleared=True)
    for number in range(1, 1000):
        held.apply(number, chain(f"told {number}"), (), cleared=False)
        held.assume(chain(f"sent {number}"))
    assert len(held) == 100
    popular = PopularPrefixes(requests=20, blocks=160)
    for number in range(1000):
        popular.add(chain("system", *(f"{number}-{block}" for block in range(number % 100))))
        assert len(popular) <= 160


def test_a_prefix_in_more_than_one_workers_share_of_requests_is_popular() -> None:
    popular = PopularPrefixes()
    for number in range(8):
        document = f"document {number % 4}"
        popular.add(chain("system", document, f"question {number}"))
    assert popular.leading(chain("system", "document 1", "new"), workers=2) == 1
    assert popular.leading(chain("other"), workers=2) == 0


def test_a_prompt_repeated_by_many_is_popular_and_a_conversation_alone_is_not() -> None:
    repeated = PopularPrefixes()
    turns = PopularPrefixes()
    for turn in range(1, 6):
        repeated.add(chain("a", "b"))
        turns.add(chain(*(f"turn {part}" for part in range(turn))))
    assert repeated.leading(chain("a", "b"), workers=2) == 2
    assert turns.leading(chain("turn 0", "turn 1"), workers=2) == 0
    turns.add(chain("turn 0", "another"))
    assert turns.leading(chain("turn 0", "turn 1"), workers=2) == 1


def test_old_requests_are_forgotten() -> None:
    popular = PopularPrefixes(requests=4)
    for number in range(4):
        popular.add(chain("then", f"{number}"))
    for number in range(4):
        popular.add(chain("now", f"{number}"))
    assert popular.leading(chain("then"), workers=2) == 0
    assert popular.leading(chain("now"), workers=2) == 1
