"""Notices of prefill's WRITEs, matched to the leases they belong to."""

import logging
from collections.abc import Callable
from dataclasses import dataclass

from epd.errors import DataLossError, EpdError
from epd.handover.lease import Lease, LeaseState
from epd.handover.leases import LeaseTable
from epd.handover.notice import Notice, NoticeKind
from epd.handover.seal import SealRecord, SealSlots

log = logging.getLogger(__name__)


@dataclass
class ArrivalCounters:
    """Notices that were not what they should be; totals since the start.

    ``unmatched``: of a transfer that is over or was never reserved; ``foreign``: from another
    agent than the lease's; ``stale``: of an earlier reservation.
    """

    malformed: int = 0
    unmatched: int = 0
    foreign: int = 0
    stale: int = 0


class Arrivals:
    """Takes notices in; none of them, whatever it says, is fatal. Owned by the event loop.

    Args:
        leases: What is expected.
        slots: Where seals land.
        on_complete: Called with each lease whose transfer has become complete.
    """

    def __init__(
        self, leases: LeaseTable, slots: SealSlots, on_complete: Callable[[Lease], None]
    ) -> None:
        self.counters = ArrivalCounters()
        #: Agent names of the connected peers, by instance id.
        self.agent_names: dict[str, str] = {}
        self._leases = leases
        self._slots = slots
        self._on_complete = on_complete

    def take_in(self, batch: list[tuple[str, bytes]]) -> None:
        """Takes (agent name, message) pairs in."""
        for agent_name, message in batch:
            try:
                notice = Notice.decode(message)
            except ValueError as error:
                self.counters.malformed += 1
                log.warning("notice from %s: %s", agent_name, error)
                continue
            lease = self._leases.get(notice.transfer_id)
            if lease is None or lease.state not in (LeaseState.RESERVED, LeaseState.RECEIVING):
                self.counters.unmatched += 1
            elif self.agent_names.get(lease.peer) != agent_name:
                self.counters.foreign += 1
                log.warning("%s announced a transfer of %s", agent_name, lease.peer)
            elif lease.generation != notice.generation:
                self.counters.stale += 1
                log.warning("notice of an earlier reservation of %s", lease.transfer_id)
            else:
                self._apply(lease, notice)

    def _apply(self, lease: Lease, notice: Notice) -> None:
        complete = False
        if notice.kind is not NoticeKind.SEAL:
            complete = self._leases.arrive(lease, notice.layer, notice.ordinal, notice.layer_count)
        if notice.kind is not NoticeKind.KV:
            try:
                record = SealRecord.decode(
                    self._slots.read(lease.seal_slot), lease.transfer_id, lease.generation
                )
                _check_announced(lease, record)
            except EpdError as error:
                self._leases.fail(lease.transfer_id, error)
                return
            complete = self._leases.accept_seal(lease, record)
        if complete:
            self._on_complete(lease)


def _check_announced(lease: Lease, record: SealRecord) -> None:
    """A token drawn after another first token than the seal's, or over layers that were not there
    yet because more WRITEs were to come than announced, must not be used.

    Raises:
        DataLossError: the seal says something else than the announcement.
    """
    if lease.announced_token is None:
        return
    assert lease.arrival is not None
    writes = lease.arrival.expected_writes
    if (lease.announced_token, writes) != (record.first_token, record.write_count):
        raise DataLossError(
            f"transfer {lease.transfer_id} was announced with first token "
            f"{lease.announced_token} and {writes} WRITEs, and sealed with "
            f"{record.first_token} and {record.write_count}"
        )
