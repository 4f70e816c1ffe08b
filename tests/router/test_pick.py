"""Routing policies, without a network."""

import random
from collections import Counter

from services.router.pick import cheapest, uncached_tokens


def test_the_cheapest_is_taken_whatever_its_load() -> None:
    assert cheapest([0.3, 0.1, 0.2], [0, 9, 0], random.Random(0)) == 1


def test_of_equal_costs_the_least_load_is_taken() -> None:
    assert cheapest([1.0, 1.1, 1.19, 1.3], [3, 2, 1, 0], random.Random(0)) == 2
    assert cheapest([0.001, 0.005], [1, 0], random.Random(0)) == 1


def test_ties_are_broken_by_chance() -> None:
    rng = random.Random(0)
    counts = Counter(cheapest([0.1] * 4, [1, 0, 0, 0], rng) for _ in range(3000))
    assert len(counts) == 3
    assert all(900 <= count <= 1100 for count in counts.values())


def test_one_token_is_always_computed() -> None:
    assert uncached_tokens(100, held_blocks=2, block_size=32) == 36
    assert uncached_tokens(64, held_blocks=2, block_size=32) == 1
