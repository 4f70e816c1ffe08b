"""Decode memory that is nobody's any more and that a writer may still touch."""

from collections.abc import Callable, Iterator

from epd.engine.block_pool import BlockPool
from epd.handover.lease import Lease, LeaseState
from epd.handover.seal import SealSlots


class Quarantine:
    """Holds blocks and seal slots of ended leases until their writer is through with them.

    While the writer is connected only its word (:meth:`settle`) ends a quarantine: that a library
    has let go of a transfer proves nothing. When it is gone the hold time ends it. Blocks that are
    lent to this worker's engine stay until they are given back, too. Same owner as the lease table.
    """

    def __init__(
        self, pool: BlockPool, slots: SealSlots, hold_s: float, clock_ns: Callable[[], int]
    ) -> None:
        self._pool = pool
        self._slots = slots
        self._hold_ns = int(hold_s * 1e9)
        self._clock_ns = clock_ns
        self._leases: dict[str, Lease] = {}
        #: When to free what writers that are gone have left, by writer.
        self._hold_until_ns: dict[str, int] = {}

    def __iter__(self) -> Iterator[Lease]:
        return iter(self._leases.values())

    def __len__(self) -> int:
        return len(self._leases)

    def get(self, transfer_id: str) -> Lease | None:
        """The quarantined lease of a transfer."""
        return self._leases.get(transfer_id)

    def add(self, lease: Lease) -> None:
        """Takes over a lease: its writable blocks are set aside, the cached ones given back. A step
        begun early may still read those; it does not write there, and its token is lost anyway.
        """
        self._pool.free(lease.block_ids[: lease.cached_block_count])
        self._pool.quarantine(lease.writable_blocks)
        lease.state = LeaseState.QUARANTINED
        self._leases[lease.transfer_id] = lease

    def settle(self, transfer_id: str) -> None:
        """The writer is through with a transfer; an unknown one is fine."""
        lease = self._leases.get(transfer_id)
        if lease is not None:
            lease.settled = True
            self._free_if_over(lease)

    def give_back(self, transfer_id: str) -> None:
        """The engine is through with a transfer; an unknown one is fine."""
        lease = self._leases.get(transfer_id)
        if lease is not None:
            lease.lent = False
            self._free_if_over(lease)

    def peer_arrived(self, peer: str) -> None:
        """The writer is connected (again): its word counts, not time."""
        self._hold_until_ns.pop(peer, None)

    def peer_gone(self, peer: str) -> None:
        """The writer is gone: what it has left is free after the hold time."""
        self._hold_until_ns[peer] = self._clock_ns() + self._hold_ns

    def expire(self) -> None:
        """Frees what writers have left whose hold time has passed."""
        now = self._clock_ns()
        over = {peer for peer, until in self._hold_until_ns.items() if now >= until}
        for lease in [one for one in self._leases.values() if one.peer in over]:
            lease.settled = True
            self._free_if_over(lease)
        for peer in over:
            del self._hold_until_ns[peer]

    def _free_if_over(self, lease: Lease) -> None:
        if lease.lent or not lease.settled:
            return
        del self._leases[lease.transfer_id]
        self._pool.settle(lease.writable_blocks)
        self._slots.give_back(lease.seal_slot)
