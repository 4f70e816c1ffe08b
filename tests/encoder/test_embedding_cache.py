"""The accounts of cache and leases under any order of events."""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from epd.encoding.embedding import EmbeddingSpec
from epd.encoding.embedding_cache import CacheEntry, EmbeddingCache, EntryState
from epd.encoding.embedding_leases import EmbeddingLeases
from epd.encoding.eviction_policy import make_policy
from epd.engine.families.base import ImagePlan
from epd.errors import InvalidRequestError, ResourceExhaustedError
from epd.transfer.arena import Arena

LEASE_S, HOLD_S = 10.0, 5.0


def spec(tokens: int) -> EmbeddingSpec:
    """256 bytes a token."""
    plan = ImagePlan((1, 2, 2 * tokens), 1, (1,) * tokens, 0, tokens)
    return EmbeddingSpec(plan, (tokens, 64), "float32")


class CacheMachine(RuleBasedStateMachine):
    """Random claims, completions, failures, renewals, releases and clock steps."""

    @initialize(
        policy=st.sampled_from(["s3fifo", "lru"]),
        capacity=st.sampled_from([0, 512, 2048]),
        working=st.sampled_from([512, 2048]),
    )
    def start(self, policy: str, capacity: int, working: int) -> None:
        self.now = 0.0
        self.abandoned: list[CacheEntry] = []
        self.cache = EmbeddingCache(
            Arena(capacity + working),
            capacity,
            make_policy(policy, capacity),  # type: ignore[arg-type]
            self.abandoned.append,
        )
        self.leases = EmbeddingLeases(self.cache, LEASE_S, HOLD_S, lambda: self.now)
        self.filling: list[CacheEntry] = []
        self.open: list[str] = []
        self.running: list[str] = []

    @rule(keys=st.lists(st.integers(0, 8), min_size=1, max_size=3, unique=True))
    def call(self, keys: list[int]) -> None:
        """A call for some images; key n has an embedding of n + 1 tokens."""
        digests = [bytes([n]) for n in keys]
        found = [entry for digest in digests if (entry := self.cache.find(digest))]
        pins = [self.leases.grant(entry) for entry in found]
        missing = [n for n in keys if self.cache.find(bytes([n])) is None]
        before = self.cache.free_bytes + self.cache.idle_bytes
        try:
            new = self.cache.claim([(bytes([n]), spec(n + 1)) for n in missing])
        except (InvalidRequestError, ResourceExhaustedError):
            assert self.leases.release(pins, settled=True) == []
            return
        assert sum(entry.size for entry in new) <= before
        self.filling += new
        self.open += pins + [self.leases.grant(entry) for entry in new]

    @precondition(lambda self: self.filling)
    @rule(data=st.data(), good=st.booleans())
    def finish(self, data: st.DataObject, good: bool) -> None:
        entry = self.filling.pop(data.draw(st.integers(0, len(self.filling) - 1)))
        if entry.state is EntryState.FILLING and good:
            self.cache.complete(entry)
            return
        if entry.state is EntryState.FILLING:
            self.cache.withdraw(entry)
        self.cache.discard(entry)

    @precondition(lambda self: self.open)
    @rule(data=st.data(), how=st.sampled_from(["end", "settled", "unsettled"]))
    def end_call(self, data: st.DataObject, how: str) -> None:
        handle = self.open.pop(data.draw(st.integers(0, len(self.open) - 1)))
        entry = self.leases.find(handle)
        assert entry is not None
        if how == "end" and entry.state is EntryState.READY:
            self.leases.run([handle])
            self.running.append(handle)
        else:
            assert self.leases.release([handle], settled=how != "unsettled") == []

    @precondition(lambda self: self.running)
    @rule(data=st.data(), how=st.sampled_from(["renew", "settled", "unsettled"]))
    def use_lease(self, data: st.DataObject, how: str) -> None:
        handle = data.draw(st.sampled_from(self.running))
        if how == "renew":
            self.leases.renew([handle])
        else:
            self.leases.release([handle], settled=how == "settled")

    @rule(seconds=st.sampled_from([1.0, HOLD_S, LEASE_S]))
    def wait(self, seconds: float) -> None:
        self.now += seconds
        self.leases.expire()

    @invariant()
    def accounts_add_up(self) -> None:
        if not hasattr(self, "cache"):
            return
        self.cache.check_integrity()
        assert self.cache.idle_bytes <= self.cache.capacity_bytes
        assert all(entry.state is EntryState.WITHDRAWN for entry in self.abandoned)

    def teardown(self) -> None:
        """With everybody gone, all memory is free or kept within the capacity."""
        if not hasattr(self, "cache"):
            return
        for entry in self.filling:
            if entry.state is EntryState.FILLING:
                self.cache.withdraw(entry)
            self.cache.discard(entry)
        self.leases.release(self.open, settled=False)
        for _ in range(3):
            self.now += LEASE_S + HOLD_S
            self.leases.expire()
        assert len(self.leases) == 0
        assert self.cache.in_use_bytes == self.cache.quarantined_bytes == 0
        assert self.cache.idle_bytes + self.cache.free_bytes == self.cache.total_bytes
        self.cache.check_integrity()


TestCacheMachine = CacheMachine.TestCase
TestCacheMachine.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)


def make_cache(capacity: int, working: int) -> EmbeddingCache:
    return EmbeddingCache(
        Arena(capacity + working), capacity, make_policy("lru", capacity), lambda entry: None
    )


def fill(cache: EmbeddingCache, key: int, tokens: int) -> CacheEntry:
    (entry,) = cache.claim([(bytes([key]), spec(tokens))])
    cache.pin(entry)
    cache.complete(entry)
    return entry


def test_a_claim_that_cannot_be_met_evicts_nothing() -> None:
    cache = make_cache(1024, 1024)
    cache.unpin(fill(cache, 1, 1))
    fill(cache, 2, 2)  # pinned
    with pytest.raises(ResourceExhaustedError, match=r"1792 bytes .* 1536 of 2048 are free"):
        cache.claim([(bytes([3]), spec(7))])
    assert cache.idle_bytes == 256


def test_pinned_entries_are_never_evicted() -> None:
    cache = make_cache(512, 512)
    pinned = fill(cache, 1, 2)
    for key in range(2, 20):
        cache.unpin(fill(cache, key, 1))
    assert cache.find(bytes([1])) is pinned


def test_eviction_makes_room_in_one_piece_when_free_memory_is_in_several() -> None:
    cache = make_cache(1024, 1024)
    cache.unpin(fill(cache, 1, 1))
    fill(cache, 2, 5)  # larger than the capacity, pinned, in between
    cache.unpin(fill(cache, 3, 1))
    assert (cache.free_bytes, cache.idle_bytes) == (256, 512)
    (entry,) = cache.claim([(bytes([4]), spec(2))])
    assert entry.size == 512
    assert cache.evictions == 2


def test_lease_of_an_open_call_does_not_run() -> None:
    now = [0.0]
    cache = make_cache(1024, 0)
    leases = EmbeddingLeases(cache, LEASE_S, HOLD_S, lambda: now[0])
    (entry,) = cache.claim([(b"1", spec(1))])
    handle = leases.grant(entry)
    cache.complete(entry)
    leases.renew([handle], reading=True)
    now[0] += 10 * LEASE_S
    assert not leases.expire()
    leases.run([handle])
    now[0] += LEASE_S - 1
    leases.renew([handle])
    now[0] += LEASE_S - 1
    assert not leases.expire()
    now[0] += 2
    assert leases.expire()
    assert cache.quarantined_bytes == 256
