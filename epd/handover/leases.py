"""Who may write to which decode memory, and when that memory may be used again. Plain Python."""

import itertools
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from epd.engine.block_pool import BlockPool
from epd.errors import (
    DuplicateRequestError,
    EpdError,
    NotFoundError,
    RequestCancelledError,
    ResourceExhaustedError,
    TransferFailedError,
    UnavailableError,
)
from epd.handover.lease import Lease, LeaseState
from epd.handover.seal import SealRecord, SealSlots
from epd.handover.tombstones import Tombstones


@dataclass(frozen=True)
class LeaseConfig:
    """Bounds of the lease table; durations in seconds.

    ``progress_timeout_s``: a lease without a WRITE or a Renew ends; also the longest time a sealed
    one waits to be taken. ``settle_grace_s``: how long notices may lag behind their writer's word
    that it is through. ``hold_s``: how long memory of a writer that is gone stays out of use.
    ``peer_share``: most of the pool's blocks that one writer may have reserved or in quarantine.
    """

    progress_timeout_s: float = 5.0
    settle_grace_s: float = 1.0
    hold_s: float = 30.0
    peer_share: float = 0.5
    tombstone_s: float = 120.0
    max_tombstones: int = 65536


@dataclass
class LeaseCounters:
    """Totals since the start."""

    granted: int = 0
    sealed: int = 0
    expired: int = 0
    failed: int = 0
    cancelled: int = 0
    refused_late: int = 0
    unknown_renewals: int = 0
    peers_lost: int = 0
    failed_by_reason: Counter[str] = field(default_factory=Counter)


class LeaseTable:
    """All leases of a decode worker, the blocks they hold and the memory in quarantine.

    Not thread-safe: one thread (the service's event loop) owns it; the pool has its own lock.

    Args:
        pool: Where blocks come from and go back to.
        slots: Where seal records land; a lease holds one for as long as its memory may be touched.
        clock_ns: A monotonic clock.
        on_end: Called with each lease that ended before it was taken, and why.
        headroom: Blocks to leave for what runs to grow into.
    """

    def __init__(
        self,
        pool: BlockPool,
        slots: SealSlots,
        layer_count: int,
        config: LeaseConfig,
        clock_ns: Callable[[], int],
        on_end: Callable[[Lease, EpdError], None],
        headroom: Callable[[], int] = lambda: 0,
    ) -> None:
        self.counters = LeaseCounters()
        self._pool = pool
        self._slots = slots
        self._layer_count = layer_count
        self._config = config
        self._clock_ns = clock_ns
        self._on_end = on_end
        self._headroom = headroom
        self._leases: dict[str, Lease] = {}
        self._generations = itertools.count(1)
        self._tombstones = Tombstones(config.max_tombstones, config.tombstone_s, clock_ns)
        self._peer_blocks: Counter[str] = Counter()

    @property
    def peer_cap(self) -> int:
        """Most blocks that one writer may hold."""
        return int(self._pool.num_blocks * self._config.peer_share)

    def count(self, state: LeaseState) -> int:
        """Leases in a state."""
        return sum(lease.state is state for lease in self._leases.values())

    def get(self, transfer_id: str) -> Lease | None:
        """The lease of a transfer, quarantined ones included."""
        return self._leases.get(transfer_id)

    def ended(self, transfer_id: str) -> EpdError | None:
        """Why a transfer is over, if it is and that is remembered."""
        return self._tombstones.get(transfer_id)

    def admit(self, transfer_id: str, peer: str, block_count: int) -> Lease | None:
        """Checks a reservation before it waits for memory; the lease if there is one already.

        Raises:
            EpdError: why the transfer is over, if it is.
            DuplicateRequestError: another peer holds a lease under this id.
            ResourceExhaustedError: the peer is at its cap, or no pool could ever hold so much.
        """
        lease = self._leases.get(transfer_id)
        if lease is not None and lease.peer != peer:
            raise DuplicateRequestError(f"transfer {transfer_id} belongs to another prefill worker")
        over = self._tombstones.get(transfer_id)
        if over is not None:
            self.counters.refused_late += 1
            raise over.with_traceback(None)
        if lease is None and self._peer_blocks[peer] + block_count > self.peer_cap:
            raise ResourceExhaustedError(
                f"prefill instance {peer} holds {self._peer_blocks[peer]} blocks, asks for "
                f"{block_count} more and may hold {self.peer_cap}",
                reason="PEER_AT_CAP",
            )
        return lease

    def grant(
        self, transfer_id: str, peer: str, block_count: int, prefix_hashes: Sequence[bytes] = ()
    ) -> Lease | None:
        """Reserves memory, or returns None when there is not enough now. Idempotent.

        ``prefix_hashes``: block hashes of the prompt's leading full blocks, to look up here.
        Raises as :meth:`admit`.
        """
        known = self.admit(transfer_id, peer, block_count)
        if known is not None:
            return known
        slot = self._slots.take()
        if slot is None:
            return None
        cached = self._pool.match_prefix(prefix_hashes[:block_count])
        fresh = self._pool.allocate(block_count - len(cached), keep_free=self._headroom())
        if fresh is None:
            self._pool.free(cached)
            self._slots.give_back(slot)
            return None
        lease = Lease(
            transfer_id,
            next(self._generations),
            peer,
            (*cached, *fresh),
            len(cached),
            slot,
            self._clock_ns(),
        )
        self._leases[transfer_id] = lease
        self._peer_blocks[peer] += len(fresh)
        self.counters.granted += 1
        return lease

    def arrive(self, lease: Lease, layer: int, ordinal: int) -> bool:
        """Notes a KV WRITE; True when that completes the transfer (now SEALED)."""
        lease.progress_ns = self._clock_ns()
        if lease.state is LeaseState.RESERVED:
            lease.state = LeaseState.RECEIVING
        lease.arrived.add(ordinal)
        lease.layers.add(layer)
        return self._seal_if_complete(lease)

    def accept_seal(self, lease: Lease, record: SealRecord) -> bool:
        """Notes the seal; True when that completes the transfer (now SEALED)."""
        lease.progress_ns = self._clock_ns()
        lease.record = record
        return self._seal_if_complete(lease)

    def take(self, transfer_id: str) -> Lease:
        """Hands a sealed lease's blocks over to the caller and ends the lease.

        Raises:
            NotFoundError: no sealed transfer has that id.
        """
        lease = self._leases.get(transfer_id)
        if lease is None or lease.state is not LeaseState.SEALED:
            raise NotFoundError(f"no sealed transfer {transfer_id}", reason="TRANSFER_UNKNOWN")
        self._remove(lease)
        self._tombstones.put(
            transfer_id, NotFoundError(f"transfer {transfer_id} is taken", reason="TRANSFER_TAKEN")
        )
        return lease

    def renew(self, transfer_ids: Iterable[str]) -> list[str]:
        """Notes progress; returns the ids without a live lease (sealed and taken ones included
        only when they ended badly or are not known at all).
        """
        unknown = []
        for transfer_id in transfer_ids:
            lease = self._leases.get(transfer_id)
            if lease is not None and lease.state is not LeaseState.QUARANTINED:
                if lease.state is not LeaseState.SEALED:
                    lease.progress_ns = self._clock_ns()
                continue
            over = self._tombstones.get(transfer_id)
            if over is not None and over.reason == "TRANSFER_TAKEN":
                continue
            self.counters.unknown_renewals += 1
            unknown.append(transfer_id)
        return unknown

    def fail(self, transfer_id: str, error: EpdError, settled: bool = False) -> None:
        """Ends a transfer that is not sealed, known or not: a late Reserve is refused.

        A sealed one stays: its data is all there. ``settled``: its writer is through.
        """
        lease = self._leases.get(transfer_id)
        if lease is None:
            self._tombstones.put(transfer_id, error)
        elif lease.state is LeaseState.QUARANTINED:
            if settled:
                self._free(lease)
        elif lease.state is not LeaseState.SEALED:
            lease.settled = lease.settled or settled
            self._end(lease, error)

    def cancel(self, transfer_id: str, error: EpdError | None = None) -> None:
        """Ends a transfer in whatever state, because nobody here wants it any more."""
        error = error or RequestCancelledError(f"transfer {transfer_id} was cancelled")
        lease = self._leases.get(transfer_id)
        if lease is None or lease.state is not LeaseState.QUARANTINED:
            self.counters.cancelled += 1
        if lease is not None and lease.state is LeaseState.SEALED:
            self._end(lease, error)
        else:
            self.fail(transfer_id, error)

    def settle(self, transfer_ids: Iterable[str]) -> None:
        """Notes that writers are through with transfers; unknown ids are fine."""
        for transfer_id in transfer_ids:
            lease = self._leases.get(transfer_id)
            if lease is None:
                continue
            if not lease.settled:
                lease.settled = True
                lease.progress_ns = self._clock_ns()
            if lease.state is LeaseState.QUARANTINED:
                self._free(lease)

    def peer_arrived(self, peer: str) -> None:
        """The writer is connected (again): its quarantines wait for its Settle."""
        for lease in self._of(peer):
            lease.hold_until_ns = None

    def peer_gone(self, peer: str) -> None:
        """The writer is gone: its transfers fail, and its memory is free after the hold time."""
        self.counters.peers_lost += 1
        for lease in self._of(peer):
            if lease.state in (LeaseState.RESERVED, LeaseState.RECEIVING):
                self._end(
                    lease,
                    UnavailableError(
                        f"prefill instance {peer} was lost during the KV push: "
                        + lease.describe(self._layer_count),
                        reason="PEER_LOST",
                    ),
                )
        until = self._clock_ns() + int(self._config.hold_s * 1e9)
        for lease in self._of(peer):
            if lease.state is LeaseState.QUARANTINED:
                lease.hold_until_ns = until

    def expire(self) -> None:
        """Ends leases without progress and quarantines whose hold time has passed."""
        now = self._clock_ns()
        for lease in list(self._leases.values()):
            if lease.state is LeaseState.QUARANTINED:
                if lease.hold_until_ns is not None and now >= lease.hold_until_ns:
                    self._free(lease)
            elif now - lease.progress_ns > self._patience_s(lease) * 1e9:
                self.counters.expired += 1
                self._end(lease, self._expiry(lease))
        self._tombstones.prune()

    def check_integrity(self) -> None:
        """Asserts that leases and seal slots account for each other."""
        slots = [lease.seal_slot for lease in self._leases.values()]
        assert len(set(slots)) == len(slots), "two leases share a seal slot"
        assert len(slots) + self._slots.free_count == self._slots.count, "seal slots lost"
        held: Counter[str] = Counter()
        for lease in self._leases.values():
            held[lease.peer] += len(lease.writable_blocks)
        assert held == +self._peer_blocks, "peers' block counts disagree"
        self._pool.check_integrity()

    def _patience_s(self, lease: Lease) -> float:
        through = lease.settled and lease.state is not LeaseState.SEALED
        return self._config.settle_grace_s if through else self._config.progress_timeout_s

    def _expiry(self, lease: Lease) -> EpdError:
        if lease.state is LeaseState.SEALED:
            return TransferFailedError(
                f"transfer {lease.transfer_id} was sealed and nobody took it in "
                f"{self._config.progress_timeout_s} s",
                reason="TRANSFER_UNCLAIMED",
            )
        return TransferFailedError(
            f"KV push from prefill to decode made no progress for "
            f"{self._patience_s(lease)} s: {lease.describe(self._layer_count)}",
            reason="TRANSFER_STALLED",
        )

    def _seal_if_complete(self, lease: Lease) -> bool:
        if lease.state is not LeaseState.QUARANTINED and lease.complete:
            lease.state = LeaseState.SEALED
            self.counters.sealed += 1
            return True
        return False

    def _end(self, lease: Lease, error: EpdError) -> None:
        """Gives the memory back, or into quarantine while its writer may be at it."""
        self.counters.failed += 1
        self.counters.failed_by_reason[error.reason] += 1
        self._tombstones.put(lease.transfer_id, error)
        cached = lease.block_ids[: lease.cached_block_count]
        if lease.settled or lease.state is LeaseState.SEALED:
            self._pool.free(lease.block_ids)
            self._remove(lease)
        else:
            self._pool.free(cached)
            self._pool.quarantine(lease.writable_blocks)
            lease.state = LeaseState.QUARANTINED
        self._on_end(lease, error)

    def _free(self, lease: Lease) -> None:
        """QUARANTINED → FREE."""
        assert lease.state is LeaseState.QUARANTINED
        self._pool.settle(lease.writable_blocks)
        self._remove(lease)

    def _remove(self, lease: Lease) -> None:
        del self._leases[lease.transfer_id]
        self._slots.give_back(lease.seal_slot)
        self._peer_blocks[lease.peer] -= len(lease.writable_blocks)
        if not self._peer_blocks[lease.peer]:
            del self._peer_blocks[lease.peer]

    def _of(self, peer: str) -> list[Lease]:
        return [lease for lease in self._leases.values() if lease.peer == peer]
