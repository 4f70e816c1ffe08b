"""The lease table neither loses nor hands out twice any memory, in any order of calls."""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from epd.engine.block_pool import BlockPool
from epd.engine.kv_arrival import KvArrival
from epd.errors import EpdError, NotFoundError, TransferFailedError
from epd.handover.lease import LeaseState
from epd.handover.lease_config import LeaseConfig
from epd.handover.leases import LeaseTable
from epd.handover.seal import SealRecord, SealSlots

BLOCKS = 24
IDS = st.sampled_from([f"t{n}" for n in range(8)])
PEERS = st.sampled_from(["p", "q", "r"])


def make_table(clock, headroom=0, **config):
    pool = BlockPool(BLOCKS, 16)
    ended = []
    table = LeaseTable(
        pool,
        SealSlots(8),
        4,
        LeaseConfig(**config),
        lambda: clock[0],
        lambda lease, error: ended.append((lease.transfer_id, error)),
        lambda: headroom,
    )
    return table, pool, ended


def seal(table, lease, writes=0):
    return table.accept_seal(
        lease, SealRecord(lease.transfer_id, lease.generation, 1, 0.0, writes, 0)
    )


def test_every_reservation_has_a_generation_of_its_own():
    table, _, _ = make_table([0])
    first = table.grant("t", "p", 2).generation
    table.fail("t", TransferFailedError("x"), settled=True)
    assert table.grant("u", "p", 2).generation != first


def test_leases_are_counted_by_another_thread_while_they_come_and_go():
    table, _, _ = make_table([0])
    table.grant("t", "p", 2)
    table.cancel(table.grant("q", "p", 2).transfer_id)

    class ComingAndGoing:
        """Looked at, it does what the event loop may do at that very moment."""

        peer = "nobody"

        @property
        def state(self):
            table.cancel(table.grant("u", "p", 2).transfer_id)
            table.grant("v", "p", 2)
            return LeaseState.SEALED

    table._leases = {"first": ComingAndGoing(), **table._leases}
    assert table.count(LeaseState.RESERVED) == 1
    del table._leases["first"]
    assert table.count(LeaseState.RESERVED) == 2
    assert table.count(LeaseState.QUARANTINED) == 2


def test_seal_counts_only_with_all_its_writes():
    table, _, _ = make_table([0])
    lease = table.grant("t", "p", 2)
    assert not table.arrive(lease, 0, 0)
    assert not seal(table, lease, writes=2)
    assert not table.arrive(lease, 0, 0)  # the same WRITE again
    assert table.arrive(lease, 1, 1)
    assert lease.state is LeaseState.SEALED


def test_seal_may_come_before_the_last_write_or_after_it():
    table, _, _ = make_table([0])
    lease = table.grant("t", "p", 2)
    table.arrive(lease, 0, 0)
    table.arrive(lease, 1, 1)
    assert seal(table, lease, writes=2)


def test_quarantine_of_a_living_writer_has_no_end_but_its_settle():
    clock = [0]
    table, pool, _ = make_table(clock, hold_s=1)
    table.grant("t", "p", 3)
    table.cancel("t")
    clock[0] = int(1e12)
    table.expire()
    assert pool.num_quarantined == 3
    table.settle(["t"])
    assert pool.num_free == BLOCKS


def test_memory_in_quarantine_is_granted_to_nobody_also_when_its_end_is_forgotten():
    clock = [0]
    table, _, _ = make_table(clock, tombstone_s=1)
    table.grant("t", "p", 3)
    table.cancel("t")
    clock[0] = int(5e9)
    table.expire()
    assert table.ended("t") is None
    with pytest.raises(NotFoundError):
        table.grant("t", "p", 3)


def test_return_of_the_writer_stops_the_hold_time():
    clock = [0]
    table, pool, _ = make_table(clock, hold_s=1)
    table.grant("t", "p", 3)
    table.peer_gone("p")
    table.peer_arrived("p")
    clock[0] = int(5e9)
    table.expire()
    assert pool.num_quarantined == 3


def test_only_the_lost_writers_transfers_fail():
    table, pool, ended = make_table([0])
    table.grant("t", "p", 3)
    table.grant("u", "q", 3)
    table.peer_gone("p")
    assert [transfer_id for transfer_id, _ in ended] == ["t"]
    assert pool.num_quarantined == 3
    assert table.get("u").state is LeaseState.RESERVED


def test_sealed_transfer_nobody_takes_is_freed_without_quarantine():
    clock = [0]
    table, pool, ended = make_table(clock, progress_timeout_s=1)
    seal(table, table.grant("t", "p", 3))
    clock[0] = int(2e9)
    table.expire()
    assert ended[0][1].reason == "TRANSFER_UNCLAIMED"
    assert pool.num_free == BLOCKS


def test_renewal_of_a_taken_transfer_is_fine_and_of_an_unknown_one_is_counted():
    table, pool, _ = make_table([0])
    seal(table, table.grant("t", "p", 1))
    pool.free(table.take("t").block_ids)
    assert table.renew(["t", "strange"]) == ["strange"]
    assert table.counters.unknown_renewals == 1


def test_taking_twice_is_not_found():
    table, pool, _ = make_table([0])
    seal(table, table.grant("t", "p", 1))
    pool.free(table.take("t").block_ids)
    with pytest.raises(NotFoundError):
        table.take("t")


def test_shared_prefix_is_released_not_quarantined():
    table, pool, _ = make_table([0])
    (block,) = pool.allocate(1)
    pool.publish(block, b"h")
    lease = table.grant("t", "p", 3, [b"h"])
    assert lease.cached_block_count == 1
    table.cancel("t")
    assert pool.num_quarantined == 2
    table.settle(["t"])
    pool.free([block])
    table.check_integrity()


def test_a_reservation_leaves_what_runs_room_to_grow():
    table, pool, _ = make_table([0], headroom=3, peer_share=1.0)
    assert table.grant("large", "p", BLOCKS - 2) is None
    assert pool.num_free == BLOCKS
    assert table.grant("fits", "p", BLOCKS - 3) is not None


def test_tombstones_are_bounded_and_expire():
    clock = [0]
    table, _, _ = make_table(clock, max_tombstones=10, tombstone_s=1)
    for number in range(100):
        table.cancel(f"t{number}")
    assert table.ended("t89") is None
    assert table.ended("t99") is not None
    clock[0] = int(2e9)
    table.expire()
    assert table.ended("t99") is None


def lend(table, transfer_id):
    lease = table.grant(transfer_id, "p", 3)
    lease.arrival, lease.announced_token = KvArrival(4), 7
    assert table.lend(transfer_id) is lease
    return lease


@pytest.mark.parametrize("sealed", [False, True])
@pytest.mark.parametrize("end", ["settle first", "give back first"])
def test_a_lent_lease_that_ends_keeps_its_blocks_until_they_are_given_back(sealed, end):
    table, pool, _ = make_table([0])
    lease = lend(table, "t")
    if sealed:
        seal(table, lease)
    table.cancel("t")
    assert lease.arrival.ended
    if end == "settle first":
        table.settle(["t"])
        assert pool.num_quarantined == 3
        table.give_back("t")
    else:
        table.give_back("t")
        assert pool.num_quarantined == (0 if sealed else 3)
        table.settle(["t"])
    assert pool.num_free == BLOCKS
    table.check_integrity()


def test_a_lent_lease_of_a_writer_that_is_gone_outlasts_the_hold_time():
    clock = [0]
    table, pool, _ = make_table(clock, hold_s=1)
    lend(table, "t")
    table.peer_gone("p")
    clock[0] = int(2e9)
    table.expire()
    assert pool.num_quarantined == 3
    table.give_back("t")
    assert pool.num_free == BLOCKS
    table.check_integrity()


def test_what_was_not_announced_or_is_over_is_not_lent():
    table, _, _ = make_table([0])
    assert table.lend("t") is None
    lease = table.grant("t", "p", 3)
    assert table.lend("t") is None
    lease.arrival = KvArrival(4)
    assert table.lend("t") is None
    table.cancel("t")
    assert table.lend("t") is None


class LeaseMachine(RuleBasedStateMachine):
    """Random histories of one decode worker."""

    @initialize()
    def start(self):
        self.clock = [0]
        self.table, self.pool, _ = make_table(
            self.clock, progress_timeout_s=3, hold_s=2, tombstone_s=4, headroom=2
        )
        self.running = []  # blocks that "the engine" owns
        self.quarantined_by_living = set()
        self.lent = {}  # leases that "the engine" has begun on

    @rule(transfer_id=IDS, peer=PEERS, count=st.integers(1, 8))
    def grant(self, transfer_id, peer, count):
        try:
            lease = self.table.grant(transfer_id, peer, count)
        except EpdError:
            return
        if lease is not None and lease.state is LeaseState.RESERVED:
            owned = {block for blocks in self.running for block in blocks}
            assert not owned & set(lease.block_ids)

    @rule(transfer_id=IDS, ordinal=st.integers(0, 3))
    def arrive(self, transfer_id, ordinal):
        lease = self.table.get(transfer_id)
        if lease and lease.state in (LeaseState.RESERVED, LeaseState.RECEIVING):
            self.table.arrive(lease, ordinal, ordinal)

    @rule(transfer_id=IDS, writes=st.integers(0, 4))
    def seal(self, transfer_id, writes):
        lease = self.table.get(transfer_id)
        if lease and lease.state in (LeaseState.RESERVED, LeaseState.RECEIVING):
            seal(self.table, lease, writes)

    @rule(transfer_id=IDS)
    def lend(self, transfer_id):
        lease = self.table.get(transfer_id)
        if lease and transfer_id not in self.lent:
            lease.arrival, lease.announced_token = lease.arrival or KvArrival(4), 7
            if self.table.lend(transfer_id):
                self.lent[transfer_id] = lease

    @rule(transfer_id=IDS)
    def give_back(self, transfer_id):
        self.lent.pop(transfer_id, None)
        self.table.give_back(transfer_id)

    @rule(transfer_id=IDS)
    def take(self, transfer_id):
        try:
            self.running.append(self.table.take(transfer_id).block_ids)
        except NotFoundError:
            return
        self.lent.pop(transfer_id, None)

    @rule()
    def finish(self):
        if self.running:
            self.pool.free(self.running.pop())

    @rule(transfer_id=IDS, settled=st.booleans())
    def fail(self, transfer_id, settled):
        self.table.fail(transfer_id, TransferFailedError("x"), settled)

    @rule(transfer_id=IDS)
    def cancel(self, transfer_id):
        self.table.cancel(transfer_id)

    @rule(transfer_id=IDS)
    def settle(self, transfer_id):
        self.table.settle([transfer_id])

    @rule(transfer_id=IDS)
    def renew(self, transfer_id):
        self.table.renew([transfer_id])

    @rule(peer=PEERS)
    def lose(self, peer):
        self.table.peer_gone(peer)

    @rule(peer=PEERS)
    def come_back(self, peer):
        self.table.peer_arrived(peer)

    @rule(seconds=st.integers(1, 3))
    def pass_time(self, seconds):
        self.clock[0] += seconds * 10**9
        self.table.expire()

    @invariant()
    def conserved(self):
        self.table.check_integrity()
        held = sum(
            len(lease.block_ids)
            for n in range(8)
            if (lease := self.table.get(f"t{n}")) and lease.state is not LeaseState.QUARANTINED
        )
        assert self.pool.num_used == held + sum(map(len, self.running))
        for transfer_id, lease in self.lent.items():
            assert self.table.get(transfer_id) is lease, "lent blocks are handed out again"

    def teardown(self):
        """Whatever happened: once every writer is gone and the hold is over, all is free."""
        for blocks in self.running:
            self.pool.free(blocks)
        for transfer_id in self.lent:
            self.table.give_back(transfer_id)
        for peer in ("p", "q", "r"):
            self.table.peer_gone(peer)
        for _ in range(3):
            self.clock[0] += 10 * 10**9
            self.table.expire()
        assert self.pool.num_free == BLOCKS
        self.table.check_integrity()


TestLeaseMachine = LeaseMachine.TestCase
TestLeaseMachine.settings = settings(max_examples=100, stateful_step_count=40, deadline=None)
