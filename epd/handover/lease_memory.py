"""The decode memory that leases hold: blocks of KV, and a slot for the seal of each."""

from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

from epd.engine.block_pool import BlockPool
from epd.errors import InvalidRequestError, ResourceExhaustedError
from epd.handover.lease import Lease, LeaseState
from epd.handover.lease_config import LeaseConfig
from epd.handover.quarantine import Quarantine
from epd.handover.seal import SealSlots


class GrantedMemory(NamedTuple):
    """What a new lease holds; the first ``cached_block_count`` blocks are only read."""

    block_ids: tuple[int, ...]
    cached_block_count: int
    seal_slot: int


class LeaseMemory:
    """Takes memory for leases and gives it back, through quarantine where a writer may be at it.

    Same owner as the lease table; the pool has its own lock.

    Args:
        pool: Where blocks come from and go back to.
        slots: Where seal records land; a lease holds one for as long as its memory may be touched.
        headroom: Blocks to leave for what runs to grow into.
    """

    def __init__(
        self,
        pool: BlockPool,
        slots: SealSlots,
        config: LeaseConfig,
        clock_ns: Callable[[], int],
        headroom: Callable[[], int],
    ) -> None:
        self._pool = pool
        self._slots = slots
        self._peer_share = config.peer_share
        self._headroom = headroom
        self.quarantine = Quarantine(pool, slots, config.hold_s, clock_ns)

    @property
    def peer_cap(self) -> int:
        """Most blocks that one writer may hold."""
        return int(self._pool.num_blocks * self._peer_share)

    def check_share(self, peer: str, held: int, block_count: int) -> None:
        """Refuses what would give a writer that holds ``held`` blocks too many.

        Raises:
            InvalidRequestError: this pool could never hold so much for one peer.
            ResourceExhaustedError: the peer is at its cap.
        """
        if block_count > self.peer_cap:
            raise InvalidRequestError(
                f"the prompt takes {block_count} blocks; a worker of {self._pool.num_blocks} "
                f"gives one prefill worker {self.peer_cap} at most",
                field="token_ids",
                reason="PROMPT_EXCEEDS_MEMORY",
            )
        if held + block_count > self.peer_cap:
            raise ResourceExhaustedError(
                f"prefill instance {peer} holds {held} blocks, asks for {block_count} more "
                f"and may hold {self.peer_cap}",
                reason="PEER_AT_CAP",
            )

    def take(self, block_count: int, prefix_hashes: Sequence[bytes]) -> GrantedMemory | None:
        """Memory for one lease, or None when there is not enough now.

        ``prefix_hashes``: block hashes of the prompt's leading full blocks, to look up here.
        """
        slot = self._slots.take()
        if slot is None:
            return None
        cached = self._pool.match_prefix(prefix_hashes[:block_count])
        fresh = self._pool.allocate(block_count - len(cached), keep_free=self._headroom())
        if fresh is None:
            self._pool.free(cached)
            self._slots.give_back(slot)
            return None
        return GrantedMemory((*cached, *fresh), len(cached), slot)

    def pass_on(self, lease: Lease) -> None:
        """The blocks are the caller's from now on, and nobody writes a seal any more."""
        self._slots.give_back(lease.seal_slot)

    def give_back(self, lease: Lease) -> None:
        """Frees everything, or sets it aside while the writer or the engine may be at it."""
        lease.settled = lease.settled or lease.state is LeaseState.SEALED
        if lease.settled and not lease.lent:
            self._pool.free(lease.block_ids)
            self._slots.give_back(lease.seal_slot)
        else:
            self.quarantine.add(lease)

    def check_integrity(self, leases: Iterable[Lease]) -> None:
        """Asserts that all leases, quarantined ones included, account for slots and blocks."""
        slots = [lease.seal_slot for lease in leases]
        assert len(set(slots)) == len(slots), "two leases share a seal slot"
        assert len(slots) + self._slots.free_count == self._slots.count, "seal slots lost"
        set_aside = sum(len(lease.writable_blocks) for lease in self.quarantine)
        assert set_aside == self._pool.num_quarantined, "quarantined blocks lost"
        self._pool.check_integrity()
