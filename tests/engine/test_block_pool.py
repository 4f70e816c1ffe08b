"""The pool under random use keeps its accounts, and a cached block is never handed out twice."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from epd.block_hashes import block_hashes
from epd.engine.block_pool import BlockPool
from epd.engine.requests import PromptImage


def test_allocates_all_or_nothing_and_keeps_the_reserve() -> None:
    pool = BlockPool(4, 16)
    assert pool.allocate(3, keep_free=2) is None
    assert pool.num_free == 4
    assert pool.allocate(2, keep_free=2) == [0, 1]
    assert pool.allocate(3) is None
    assert pool.num_used == 2


def test_hands_out_neighbouring_blocks_in_rising_order_after_churn() -> None:
    pool = BlockPool(8, 16)
    first = pool.allocate(8)
    assert first is not None
    random.Random(0).shuffle(first)
    pool.free(first)
    assert pool.allocate(8) == list(range(8))


def test_a_freed_published_block_is_found_until_evicted() -> None:
    pool = BlockPool(2, 4)
    hashes = block_hashes(range(8), (), 4)
    blocks = pool.allocate(2)
    assert blocks is not None
    for block, block_hash in zip(blocks, hashes, strict=True):
        pool.publish(block, block_hash)
    pool.free(blocks)
    assert pool.num_free == 2
    assert pool.match_prefix(hashes) == blocks
    assert pool.match_prefix(hashes[:1]) == blocks[:1]  # shared by two holders
    pool.free(blocks)
    pool.free(blocks[:1])
    assert pool.allocate(1) == [blocks[1]], "the end of a chain goes before its beginning"
    assert pool.match_prefix(hashes) == blocks[:1]
    pool.check_integrity()


def test_quarantined_blocks_are_not_handed_out_before_they_settle() -> None:
    pool = BlockPool(2, 4)
    blocks = pool.allocate(2)
    assert blocks is not None
    pool.quarantine(blocks)
    assert (pool.num_free, pool.num_quarantined) == (0, 2)
    assert pool.allocate(1) is None
    pool.settle(blocks)
    assert pool.allocate(2) == blocks


def test_a_disabled_cache_never_matches() -> None:
    pool = BlockPool(1, 4, enable_prefix_cache=False)
    hashes = block_hashes(range(4), (), 4)
    assert pool.allocate(1) == [0]
    pool.publish(0, hashes[0])
    assert pool.match_prefix(hashes) == []


@given(st.integers(0, 2**32))
def test_integrity_holds_under_random_use(seed: int) -> None:
    rng = random.Random(seed)
    pool = BlockPool(8, 1)
    held: list[list[int]] = []
    quarantined: list[list[int]] = []
    for _ in range(60):
        action = rng.choice(["allocate", "free", "quarantine", "settle", "match", "publish"])
        if action == "allocate" and (blocks := pool.allocate(rng.randint(1, 4))):
            held.append(blocks)
        elif action == "match":
            held.append(pool.match_prefix([bytes([rng.randrange(4)])]))
        elif action == "settle" and quarantined:
            pool.settle(quarantined.pop())
        elif held and action == "free":
            pool.free(held.pop(rng.randrange(len(held))))
        elif held and action == "publish":
            for block in rng.choice(held):
                pool.publish(block, bytes([rng.randrange(4)]))
        elif held and action == "quarantine":
            blocks = held[-1]
            if not any(set(blocks) & set(other) for other in held[:-1]):
                pool.quarantine(held.pop())
                quarantined.append(blocks)
        pool.check_integrity()
        distinct = {block for blocks in held for block in blocks}
        assert pool.num_used == len(distinct)
        assert pool.num_free + pool.num_used + pool.num_quarantined == 8


def test_block_hashes_chain_and_cover_the_images_content() -> None:
    tokens = list(range(12))
    cat = PromptImage(offset=2, length=4, digest=b"c" * 32)
    dog = PromptImage(offset=2, length=4, digest=b"d" * 32)
    plain, with_cat, with_dog = (block_hashes(tokens, i, 4) for i in ((), (cat,), (dog,)))
    assert len({*plain, *with_cat, *with_dog}) == 9, "a difference stays in all later blocks"
    late = PromptImage(offset=9, length=2, digest=b"c" * 32)
    assert block_hashes(tokens, (late,), 4)[:2] == plain[:2]
    assert block_hashes(tokens, (cat,), 4, known=with_cat[:2]) == with_cat
    assert block_hashes(tokens[:7], (), 4) == plain[:1], "only full blocks have a hash"


def test_block_hashes_tell_where_in_an_image_a_block_lies() -> None:
    """Placeholders are alike, so no token says it: a run may follow others of its kind."""
    tokens = [7] * 8
    hashes = {
        tuple(block_hashes(tokens, (PromptImage(offset, 4, b"c" * 32),), 4)) for offset in range(5)
    }
    assert len({chain[-1] for chain in hashes}) == 5


def test_followers_see_every_change_or_a_full_list() -> None:
    pool = BlockPool(2, 1)
    follower = pool.events.subscribe()
    assert [e.cleared for e in follower.poll()] == [True]
    assert pool.allocate(2) == [0, 1]
    pool.publish(0, b"a")
    pool.publish(1, b"b")
    pool.free([0, 1])
    assert pool.allocate(1) == [1]
    stored = [h for e in follower.poll() for h in e.stored]
    assert stored == [b"a", b"b"]
    assert follower.poll() == []
    late = pool.events.subscribe().poll()
    assert [(e.stored, e.cleared) for e in late] == [((b"a",), True)]


@pytest.mark.parametrize("behind", [3, 4])
def test_a_follower_that_lost_changes_starts_over(behind: int) -> None:
    from epd.engine.kv_events import KvEventLog

    log = KvEventLog(capacity=3)
    follower = log.subscribe()
    follower.poll()
    for number in range(behind):
        log.record(stored=[bytes([number])])
    events = follower.poll()
    assert events[0].cleared == (behind > 3)
    assert {h for e in events for h in e.stored} == {bytes([n]) for n in range(behind)}
