"""Who may write to which decode memory, and when that memory may be used again. Plain Python."""

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence

from epd.engine.block_pool import BlockPool
from epd.errors import (
    DuplicateRequestError,
    EpdError,
    NotFoundError,
    RequestCancelledError,
    TransferFailedError,
    UnavailableError,
)
from epd.handover.lease import Lease, LeaseState
from epd.handover.lease_config import LeaseConfig
from epd.handover.lease_counters import LeaseCounters
from epd.handover.lease_memory import LeaseMemory
from epd.handover.seal import SealRecord, SealSlots
from epd.handover.tombstones import Tombstones


class LeaseTable:
    """All leases of a decode worker, those in quarantine included.

    Not thread-safe: one thread (the service's event loop) owns it; the pool has its own lock.

    Args:
        pool, slots, headroom: See :class:`LeaseMemory`.
        clock_ns: A monotonic clock.
        on_end: Called with each lease that ended before it was taken, and why.
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
        self._memory = LeaseMemory(pool, slots, config, clock_ns, headroom)
        self._quarantine = self._memory.quarantine
        self._layer_count = layer_count
        self._config = config
        self._clock_ns = clock_ns
        self._on_end = on_end
        self._leases: dict[str, Lease] = {}
        self._generations = itertools.count(1)
        self._tombstones = Tombstones(config.max_tombstones, config.tombstone_s, clock_ns)

    @property
    def peer_cap(self) -> int:
        """Most blocks that one writer may hold."""
        return self._memory.peer_cap

    def count(self, state: LeaseState) -> int:
        """Leases in a state. Any thread: metrics are scraped while leases come and go."""
        return sum(lease.state is state for lease in [*self._leases.values(), *self._quarantine])

    def get(self, transfer_id: str) -> Lease | None:
        """The lease of a transfer, quarantined ones included."""
        return self._leases.get(transfer_id) or self._quarantine.get(transfer_id)

    def ended(self, transfer_id: str) -> EpdError | None:
        """Why a transfer is over, if it is and that is remembered."""
        return self._tombstones.get(transfer_id)

    def admit(self, transfer_id: str, peer: str, block_count: int) -> Lease | None:
        """Checks a reservation before it waits for memory; the lease if there is one already.

        Raises:
            EpdError: why the transfer is over, if it is.
            DuplicateRequestError: another peer holds a lease under this id.
            NotFoundError: it is over, so long ago that it is not known why.
            InvalidRequestError: this pool could never hold so much for one peer.
            ResourceExhaustedError: the peer is at its cap.
        """
        lease = self.get(transfer_id)
        if lease is not None and lease.peer != peer:
            raise DuplicateRequestError(f"transfer {transfer_id} belongs to another prefill worker")
        over = self._tombstones.get(transfer_id)
        if over is not None:
            self.counters.refused_late += 1
            raise over.with_traceback(None)
        if lease is not None and lease.state is LeaseState.QUARANTINED:
            raise NotFoundError(f"transfer {transfer_id} is over", reason="TRANSFER_UNKNOWN")
        if lease is None:
            held = sum(len(one.writable_blocks) for one in self._all() if one.peer == peer)
            self._memory.check_share(peer, held, block_count)
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
        memory = self._memory.take(block_count, prefix_hashes)
        if memory is None:
            return None
        lease = Lease(transfer_id, next(self._generations), peer, *memory, self._clock_ns())
        self._leases[transfer_id] = lease
        self.counters.granted += 1
        return lease

    def arrive(self, lease: Lease, layer: int, ordinal: int, layer_count: int = 1) -> bool:
        """Notes a KV WRITE of ``layer_count`` layers from ``layer`` on; True when that completes
        the transfer (now SEALED).
        """
        lease.progress_ns = self._clock_ns()
        if lease.state is LeaseState.RESERVED:
            lease.state = LeaseState.RECEIVING
        layers = range(layer, min(layer + layer_count, self._layer_count))
        if lease.arrival is not None and layers and ordinal not in lease.arrived:
            lease.arrival.note(layers)
        lease.arrived.add(ordinal)
        lease.layers.update(layers)
        return self._seal_if_complete(lease)

    def accept_seal(self, lease: Lease, record: SealRecord) -> bool:
        """Notes the seal; True when that completes the transfer (now SEALED)."""
        lease.progress_ns = self._clock_ns()
        lease.record = record
        return self._seal_if_complete(lease)

    def lend(self, transfer_id: str) -> Lease | None:
        """Lets the engine begin on a lease whose KV still arrives; None when there is none. Its
        blocks are nobody else's until :meth:`give_back` or :meth:`take`, also when it ends.
        """
        lease = self._leases.get(transfer_id)
        if lease is None or lease.arrival is None or lease.announced_token is None:
            return None
        lease.lent = True
        return lease

    def give_back(self, transfer_id: str) -> None:
        """The engine is through with a lent lease; an unknown one, or one taken, is fine."""
        lease = self._leases.get(transfer_id)
        if lease is not None:
            lease.lent = False
        self._memory.quarantine.give_back(transfer_id)

    def take(self, transfer_id: str) -> Lease:
        """Hands a sealed lease's blocks over to the caller and ends the lease.

        Raises:
            NotFoundError: no sealed transfer has that id.
        """
        lease = self._leases.get(transfer_id)
        if lease is None or lease.state is not LeaseState.SEALED:
            raise NotFoundError(f"no sealed transfer {transfer_id}", reason="TRANSFER_UNKNOWN")
        del self._leases[transfer_id]
        self._memory.pass_on(lease)
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
            if lease is not None:
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
            if settled:
                self._quarantine.settle(transfer_id)
        elif lease.state is not LeaseState.SEALED:
            lease.settled = lease.settled or settled
            self._end(lease, error)

    def cancel(self, transfer_id: str, error: EpdError | None = None) -> None:
        """Ends a transfer in whatever state, because nobody here wants it any more."""
        error = error or RequestCancelledError(f"transfer {transfer_id} was cancelled")
        lease = self._leases.get(transfer_id)
        self.counters.cancelled += 1
        if lease is not None and lease.state is LeaseState.SEALED:
            self._end(lease, error)
        else:
            self.fail(transfer_id, error)

    def settle(self, transfer_ids: Iterable[str]) -> None:
        """Notes that writers are through with transfers; a late Reserve of one is refused."""
        for transfer_id in transfer_ids:
            self._quarantine.settle(transfer_id)
            lease = self._leases.get(transfer_id)
            if lease is None:
                text = f"prefill is through with transfer {transfer_id} and has reserved nothing"
                self._tombstones.put(transfer_id, TransferFailedError(text))
            elif not lease.settled:
                lease.settled = True
                lease.progress_ns = self._clock_ns()

    def peer_arrived(self, peer: str) -> None:
        """The writer is connected (again): its quarantines wait for its Settle."""
        self._quarantine.peer_arrived(peer)

    def peer_gone(self, peer: str) -> None:
        """The writer is gone: its transfers fail, and its memory is free after the hold time."""
        self.counters.peers_lost += 1
        for lease in list(self._leases.values()):
            if lease.peer == peer and lease.state is not LeaseState.SEALED:
                text = f"prefill instance {peer} was lost during the KV push: "
                far = lease.describe(self._layer_count)
                self._end(lease, UnavailableError(text + far, reason="PEER_LOST"))
        self._quarantine.peer_gone(peer)

    def expire(self) -> None:
        """Ends leases without progress and quarantines whose hold time has passed."""
        now = self._clock_ns()
        for lease in list(self._leases.values()):
            if now - lease.progress_ns > self._patience_s(lease) * 1e9:
                self.counters.expired += 1
                self._end(lease, self._expiry(lease))
        self._quarantine.expire()
        self._tombstones.prune()

    def check_integrity(self) -> None:
        """Asserts that leases, seal slots and blocks account for each other."""
        self._memory.check_integrity(self._all())

    def _all(self) -> Iterator[Lease]:
        return itertools.chain(self._leases.values(), self._quarantine)

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
        if lease.complete:
            lease.state = LeaseState.SEALED
            self.counters.sealed += 1
            return True
        return False

    def _end(self, lease: Lease, error: EpdError) -> None:
        self.counters.failed += 1
        self.counters.failed_by_reason[error.reason] += 1
        self._tombstones.put(lease.transfer_id, error)
        del self._leases[lease.transfer_id]
        if lease.arrival is not None:
            lease.arrival.end()
        self._memory.give_back(lease)
        self._on_end(lease, error)
