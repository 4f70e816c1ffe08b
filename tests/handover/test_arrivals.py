"""Only a notice of this very reservation, from its own writer, counts."""

import pytest

from epd.engine.block_pool import BlockPool
from epd.handover.arrivals import Arrivals
from epd.handover.lease import LeaseState
from epd.handover.lease_config import LeaseConfig
from epd.handover.leases import LeaseTable
from epd.handover.notice import Notice, NoticeKind
from epd.handover.seal import SealRecord, SealSlots


@pytest.fixture
def slots():
    return SealSlots(4)


@pytest.fixture
def leases(slots):
    return LeaseTable(
        BlockPool(8, 16), slots, 4, LeaseConfig(), lambda: 0, lambda lease, error: None
    )


@pytest.fixture
def complete():
    return []


@pytest.fixture
def arrivals(leases, slots, complete):
    arrivals = Arrivals(leases, slots, complete.append)
    arrivals.agent_names.update(p="agent-p", q="agent-q")
    return arrivals


def notice(lease, kind=NoticeKind.KV, **changes):
    fields = {"transfer_id": lease.transfer_id, "generation": lease.generation, "ordinal": 0}
    return Notice(kind, **{**fields, **changes}).encode()


def test_notice_of_another_writer_is_foreign(leases, arrivals):
    lease = leases.grant("t", "p", 1)
    arrivals.take_in([("agent-q", notice(lease)), ("nobody", notice(lease))])
    assert arrivals.counters.foreign == 2
    assert lease.state is LeaseState.RESERVED


def test_notice_of_an_earlier_reservation_is_stale(leases, arrivals):
    lease = leases.grant("t", "p", 1)
    arrivals.take_in([("agent-p", notice(lease, generation=lease.generation - 1))])
    assert arrivals.counters.stale == 1
    assert not lease.arrived


@pytest.mark.parametrize("transfer_id", ["t1", "", "T"])
def test_notice_of_a_similar_id_is_unmatched(leases, arrivals, transfer_id):
    lease = leases.grant("t", "p", 1)
    arrivals.take_in([("agent-p", notice(lease, transfer_id=transfer_id))])
    assert arrivals.counters.unmatched == 1
    assert not lease.arrived


def test_notice_for_quarantined_memory_changes_nothing(leases, arrivals):
    lease = leases.grant("t", "p", 1)
    leases.cancel("t")
    arrivals.take_in([("agent-p", notice(lease))])
    assert arrivals.counters.unmatched == 1
    assert lease.state is LeaseState.QUARANTINED


def test_damaged_messages_do_not_stop_the_good_ones(leases, slots, arrivals, complete):
    lease = leases.grant("t", "p", 1)
    record = SealRecord("t", lease.generation, 7, 0.0, 1, 64)
    slots.write(lease.seal_slot, record.encode())
    arrivals.take_in(
        [("agent-p", one) for one in (b"", notice(lease)[:-1], notice(lease))]
        + [("agent-p", notice(lease, NoticeKind.SEAL))]
    )
    assert arrivals.counters.malformed == 2
    assert complete == [lease]
    assert lease.record == record


def test_seal_notice_without_a_seal_fails_the_transfer(leases, arrivals, complete):
    lease = leases.grant("t", "p", 1)
    arrivals.take_in([("agent-p", notice(lease, NoticeKind.SEAL))])
    assert complete == []
    assert leases.ended("t").code == "DATA_LOSS"


def test_a_seal_that_came_with_the_last_layers_completes_the_transfer(
    leases, slots, arrivals, complete
):
    lease = leases.grant("t", "p", 1)
    slots.write(lease.seal_slot, SealRecord("t", lease.generation, 7, 0.0, 2, 64).encode())
    last = {"layer": 2, "layer_count": 2, "ordinal": 1}
    arrivals.take_in([("agent-p", notice(lease, NoticeKind.SEALED_KV, **last))])
    assert complete == []
    assert lease.layers == {2, 3}
    arrivals.take_in([("agent-p", notice(lease, layer_count=2))])
    assert complete == [lease]
    assert lease.record.first_token == 7


def test_a_damaged_seal_that_came_with_layers_fails_the_transfer(leases, arrivals, complete):
    lease = leases.grant("t", "p", 1)
    arrivals.take_in([("agent-p", notice(lease, NoticeKind.SEALED_KV))])
    assert complete == []
    assert leases.ended("t").code == "DATA_LOSS"
