import random
from itertools import accumulate

import pytest
from hypothesis import given
from hypothesis import strategies as st

from epd.encoding.eviction_policy import EvictionPolicy, LruPolicy, S3FifoPolicy, make_policy


def key(n: int) -> bytes:
    return n.to_bytes(4, "big")


def evictable(_: bytes) -> bool:
    return True


def hit_rate(policy: EvictionPolicy, requests: list[int], capacity: int) -> float:
    """Unit-size items through a cache of ``capacity`` items."""
    held: set[bytes] = set()
    hits = 0
    for request in map(key, requests):
        if request in held:
            hits += 1
            policy.touch(request)
            continue
        if len(held) == capacity:
            victim = policy.evict(evictable)
            assert victim is not None
            held.remove(victim)
        policy.insert(request, 1)
        held.add(request)
    return hits / len(requests)


def test_lru_evicts_the_least_recently_used() -> None:
    policy = LruPolicy()
    for n in range(3):
        policy.insert(key(n), 1)
    policy.touch(key(0))
    assert [policy.evict(evictable) for _ in range(4)] == [key(1), key(2), key(0), None]


def test_s3fifo_keeps_used_keys_from_a_stream_of_one_hit_wonders() -> None:
    policy = S3FifoPolicy(capacity_bytes=10)
    for n in range(3):
        policy.insert(key(n), 1)
        policy.touch(key(n))
        policy.touch(key(n))
    held = {key(n) for n in range(3)}
    for n in range(100, 200):
        policy.insert(key(n), 1)
        held.add(key(n))
        while len(held) > 10:
            victim = policy.evict(evictable)
            assert victim is not None
            held.remove(victim)
    assert {key(0), key(1), key(2)} <= held


def test_s3fifo_takes_a_ghost_into_the_main_queue() -> None:
    policy = S3FifoPolicy(capacity_bytes=10)
    policy.insert(key(1), 5)
    assert policy.evict(evictable) == key(1)
    policy.insert(key(1), 5)  # comes back: proven reuse
    policy.insert(key(2), 5)
    assert policy.evict(evictable) == key(2)


@pytest.mark.parametrize("seed", range(3))
def test_s3fifo_beats_lru_on_zipf_with_one_hit_wonders(seed: int) -> None:
    generator = random.Random(seed)
    weights = list(accumulate(1 / (rank + 1) for rank in range(1000)))
    requests = [
        generator.choices(range(1000), cum_weights=weights)[0]
        if generator.random() < 0.6
        else 1_000_000 + n
        for n in range(20_000)
    ]
    s3fifo = hit_rate(S3FifoPolicy(100), requests, 100)
    lru = hit_rate(LruPolicy(), requests, 100)
    assert s3fifo > lru + 0.02


operations = st.lists(
    st.tuples(
        st.sampled_from(["insert", "touch", "remove", "evict"]), st.integers(0, 9), st.booleans()
    ),
    max_size=200,
)


@pytest.mark.parametrize("name", ["s3fifo", "lru"])
@given(operations=operations)
def test_evicts_exactly_what_is_in_and_may_go(
    name: str, operations: list[tuple[str, int, bool]]
) -> None:
    policy = make_policy(name, 20)  # type: ignore[arg-type]
    held: dict[bytes, bool] = {}  # key to "may be evicted"
    for operation, n, may_go in operations:
        if operation == "insert" and key(n) not in held:
            policy.insert(key(n), 1 + n % 3)
            held[key(n)] = may_go
        elif operation == "touch":
            policy.touch(key(n))
        elif operation == "remove":
            policy.remove(key(n))
            held.pop(key(n), None)
        elif operation == "evict":
            victim = policy.evict(lambda one: held[one])
            if victim is None:
                assert not any(held.values())
            else:
                assert held.pop(victim)
