"""Routing policies, without a network."""

import random
from collections import Counter
from dataclasses import dataclass

from services.router.pick import least_loaded


@dataclass
class Candidate:
    address: str
    load: int


def candidates(*loads: int) -> list[Candidate]:
    return [Candidate(f"10.0.0.{index}:1", load) for index, load in enumerate(loads)]


def test_the_least_loaded_is_taken() -> None:
    assert least_loaded(candidates(3, 1, 2), random.Random(0)).load == 1


def test_ties_are_broken_by_chance() -> None:
    rng = random.Random(0)
    pool = candidates(1, 0, 0, 0)
    counts = Counter(least_loaded(pool, rng).address for _ in range(3000))
    assert len(counts) == 3
    assert all(900 <= count <= 1100 for count in counts.values())
