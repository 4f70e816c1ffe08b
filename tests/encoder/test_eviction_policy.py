import itertools
import random
from itertools import accumulate

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bench.reuse_workloads import chat_window
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
    policy = S3FifoPolicy(capacity_bytes=20)
    policy.insert(key(1), 5)
    assert policy.evict(evictable) == key(1)
    policy.insert(key(1), 5)  # comes back: proven reuse
    policy.insert(key(2), 5)
    policy.insert(key(3), 5)
    assert policy.evict(evictable) == key(2)


def test_s3fifo_gives_room_to_the_queue_whose_ghosts_come_back() -> None:
    policy = S3FifoPolicy(capacity_bytes=100)
    targets = [policy.small_target_bytes]
    for n in range(6):
        policy.insert(key(n), 10)
        assert policy.evict(evictable) == key(n)  # dropped by the small queue
        policy.insert(key(n), 10)
        targets.append(policy.small_target_bytes)
        if n < 5:
            policy.remove(key(n))
    assert all(before < after < 100 for before, after in itertools.pairwise(targets))
    assert policy.evict(evictable) == key(5)  # dropped by the main queue
    policy.insert(key(5), 10)
    assert policy.small_target_bytes < targets[-1]


@pytest.mark.parametrize("seed", range(3))
def test_s3fifo_does_not_lose_to_lru_where_everything_comes_again_soon(seed: int) -> None:
    requests = list(chat_window(8000, seed, chats=32))
    numbers = {image: number for number, image in enumerate(dict.fromkeys(requests))}
    requests = [numbers[image] for image in requests]
    s3fifo = hit_rate(S3FifoPolicy(70), requests, 70)
    lru = hit_rate(LruPolicy(), requests, 70)
    assert s3fifo > lru - 0.01


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
