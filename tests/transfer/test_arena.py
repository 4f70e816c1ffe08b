"""The arena hands out disjoint ranges, all or nothing, and loses no byte."""

import threading

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, rule

from epd.transfer.arena import Arena, ByteRange


def test_ranges_are_aligned_and_disjoint():
    arena = Arena(4096, alignment=256)
    assert [arena.allocate(1), arena.allocate(300), arena.allocate(256)] == [
        ByteRange(0, 1),
        ByteRange(256, 300),
        ByteRange(768, 256),
    ]
    assert arena.used_bytes == 256 + 512 + 256
    arena.check_integrity()


def test_all_of_a_request_or_nothing():
    arena = Arena(1024, alignment=256)
    assert arena.allocate_all([512, 256, 512]) is None
    assert arena.used_bytes == 0
    assert arena.allocate_all([512, 512]) is not None
    assert arena.allocate(1) is None


def test_capacity_zero_grants_nothing_and_is_no_error():
    arena = Arena(0)
    assert arena.allocate(1) is None
    arena.check_integrity()


def test_quarantined_bytes_are_not_handed_out_before_they_settle():
    arena = Arena(512, alignment=256)
    whole = arena.allocate(512)
    assert whole is not None
    arena.quarantine(whole)
    assert (arena.used_bytes, arena.quarantined_bytes, arena.free_bytes) == (0, 512, 0)
    assert arena.allocate(1) is None
    arena.settle(whole)
    assert arena.allocate(512) == whole


def test_a_range_is_given_back_only_once():
    arena = Arena(512)
    one = arena.allocate(10)
    assert one is not None
    arena.free(one)
    with pytest.raises(KeyError):
        arena.free(one)
    with pytest.raises(KeyError):
        arena.settle(one)


def test_neighbouring_holes_join_in_any_order_of_freeing():
    arena = Arena(1024, alignment=256)
    parts = arena.allocate_all([256] * 4)
    assert parts is not None
    for index in (1, 3, 0, 2):
        arena.free(parts[index])
        arena.check_integrity()
    assert arena.allocate(1024) == ByteRange(0, 1024)


def test_threads_never_share_a_range():
    arena = Arena(64 * 256)
    owners: dict[ByteRange, int] = {}
    clashes = []

    def work(me: int) -> None:
        for _ in range(500):
            mine = arena.allocate(200)
            if mine is None:
                continue
            if owners.setdefault(mine, me) != me:
                clashes.append(mine)
            del owners[mine]
            arena.free(mine)

    threads = [threading.Thread(target=work, args=(n,)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not clashes
    assert arena.free_bytes == arena.capacity_bytes
    arena.check_integrity()


class ArenaMachine(RuleBasedStateMachine):
    """Any order of calls keeps every byte accounted for."""

    used = Bundle("used")
    quarantined = Bundle("quarantined")

    def __init__(self) -> None:
        super().__init__()
        self.arena = Arena(8192, alignment=64)
        self.held: list[ByteRange] = []

    @rule(target=used, length=st.integers(1, 3000))
    def allocate(self, length):
        granted = self.arena.allocate(length)
        if granted:
            assert all(
                granted.offset + granted.length <= other.offset
                or other.offset + other.length <= granted.offset
                for other in self.held
            )
            self.held.append(granted)
        return granted

    @rule(one=consumes(used))
    def free(self, one):
        if one:
            self.arena.free(one)
            self.held.remove(one)

    @rule(target=quarantined, one=consumes(used))
    def quarantine(self, one):
        if one:
            self.arena.quarantine(one)
        return one

    @rule(one=consumes(quarantined))
    def settle(self, one):
        if one:
            self.arena.settle(one)
            self.held.remove(one)

    @invariant()
    def conserved(self):
        self.arena.check_integrity()


TestArenaMachine = ArenaMachine.TestCase
