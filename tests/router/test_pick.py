"""Routing policies, without a network."""

import random
from collections import Counter
from dataclasses import dataclass

from hypothesis import given
from hypothesis import strategies as st

from services.router.pick import by_affinity, least_loaded


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


@given(loads=st.lists(st.integers(0, 50), min_size=1, max_size=8), digest=st.binary(max_size=32))
def test_affinity_always_finds_one_within_the_bound(loads: list[int], digest: bytes) -> None:
    pool = candidates(*loads)
    pick = by_affinity(digest, pool, [0] * len(pool))
    mean_after = (sum(loads) + 1) / len(loads)
    assert loads[pick.position] + 1 <= 1.25 * mean_after + 1


def test_a_content_keeps_its_home_while_others_come_and_go() -> None:
    pool = candidates(*[0] * 5)
    digests = [bytes([index]) * 32 for index in range(200)]
    homes = [pool[by_affinity(digest, pool, [0] * 5).position].address for digest in digests]
    fewer = pool[1:]
    for digest, home in zip(digests, homes, strict=True):
        now = fewer[by_affinity(digest, fewer, [0] * 4).position].address
        assert now == home or home == pool[0].address
    assert all(count >= 20 for count in Counter(homes).values())


def test_images_planned_in_the_same_request_count_as_load() -> None:
    pool = candidates(0, 0)
    digest = b"x" * 32
    home = by_affinity(digest, pool, [0, 0])
    added = [0, 0]
    added[home.position] = 3
    away = by_affinity(digest, pool, added)
    assert home.is_home
    assert not away.is_home
    assert away.position != home.position
