"""The decode side of the KV hand-over."""

import asyncio
import logging
import time
from collections.abc import Callable, Iterable, Sequence

from epd.engine.block_pool import BlockPool
from epd.engine.kv_arrival import KvArrival
from epd.engine.kv_layout import KvLayout
from epd.errors import (
    DataLossError,
    EpdError,
    InvalidRequestError,
    NotFoundError,
    TransferFailedError,
    UnavailableError,
)
from epd.handover.arrivals import Arrivals
from epd.handover.arriving_transfer import ArrivingTransfer
from epd.handover.control import Reservation
from epd.handover.lease import Lease, LeaseState
from epd.handover.lease_plans import LeasePlans
from epd.handover.leases import LeaseTable
from epd.handover.receiver_config import ReceiverConfig
from epd.handover.reserve_queue import ReserveQueue
from epd.handover.seal import SealSlots
from epd.handover.sealed_transfer import SealedTransfer
from epd.handover.verifier import KvVerifier
from epd.transfer.agent import TransferAgent
from epd.transfer.base import AgentDescriptor

log = logging.getLogger(__name__)


class KvReceiver:
    """Reserves blocks for prefill's WRITEs and says when a prompt's KV is complete.

    A transfer is complete when the seal record and as many KV notices as it counts have arrived.
    Each notice follows its own WRITE's data, so no order between WRITEs is needed and a lost notice
    is a transfer that never completes, not a wrong answer.

    Everything runs on the event loop that :meth:`run` runs on; notices hop there from the agent
    thread.

    Args:
        pool: The engine's blocks.
        layout: This worker's KV.
        agent: Started, with the KV memory and ``slots.segment`` registered.
        slots: One seal slot per transfer that can be open at once; with ``verifier``, with room
            for a digest per layer.
        config: Bounds.
        headroom: Blocks that a reservation must leave for the engine's running requests.
        verifier: Given, it looks at all KV before that is used.
    """

    def __init__(
        self,
        pool: BlockPool,
        layout: KvLayout,
        agent: TransferAgent,
        slots: SealSlots,
        config: ReceiverConfig | None = None,
        headroom: Callable[[], int] = lambda: 0,
        verifier: KvVerifier | None = None,
    ) -> None:
        self.config = config or ReceiverConfig()
        self.leases = LeaseTable(
            pool,
            slots,
            layout.layer_count,
            self.config.leases,
            time.monotonic_ns,
            self._on_end,
            headroom,
        )
        self._layout = layout
        self._verifier = verifier
        self._agent = agent
        self._slots = slots
        self._plans = LeasePlans(agent, layout, slots)
        self._queue = ReserveQueue(self.config.max_waiting, self.config.reserve_timeout_s)
        self.arrivals = Arrivals(self.leases, slots, self._on_complete)
        self._waiting: dict[str, asyncio.Future[Lease]] = {}
        self._announced: dict[str, asyncio.Event] = {}

    @property
    def waiting_reservations(self) -> int:
        """Reservations that wait for blocks."""
        return len(self._queue)

    async def run(self) -> None:
        """Takes notices in, serves the queue and expires leases, until cancelled."""
        loop = asyncio.get_running_loop()

        def hop(batch: list[tuple[str, bytes]]) -> None:
            loop.call_soon_threadsafe(self.arrivals.take_in, batch)

        self._agent.subscribe(hop)
        try:
            next_expiry = 0.0
            while True:
                # The engine frees blocks on its own thread and tells nobody, hence the tick.
                await asyncio.sleep(
                    self.config.tick_s if len(self._queue) else self.config.expire_every_s
                )
                self._queue.serve()
                if loop.time() >= next_expiry:
                    next_expiry = loop.time() + self.config.expire_every_s
                    self.leases.expire()
        finally:
            self._agent.unsubscribe(hop)

    def peer_arrived(self, peer: AgentDescriptor) -> None:
        """A prefill process is paired and may reserve."""
        self.arrivals.agent_names[peer.instance_id] = peer.agent_name
        self._plans.peer_arrived(peer)
        self.leases.peer_arrived(peer.instance_id)

    def peer_gone(self, instance_id: str) -> None:
        """A prefill process is gone: its transfers fail, its memory is free after the hold time."""
        self.arrivals.agent_names.pop(instance_id, None)
        self._plans.peer_gone(instance_id)
        error = UnavailableError(f"prefill instance {instance_id} is gone", reason="PEER_LOST")
        self._queue.drop_peer(instance_id, error)
        self.leases.peer_gone(instance_id)

    async def reserve(
        self,
        transfer_id: str,
        sender_instance_id: str,
        token_count: int,
        block_hashes: Sequence[bytes] = (),
    ) -> Reservation:
        """Reserves blocks for ``token_count`` tokens. Waits in a bounded queue; idempotent.

        ``block_hashes`` name the prompt's leading full blocks: those found in the prefix cache are
        part of the reservation and not to be pushed.

        Raises:
            InvalidRequestError: no tokens, or hashes of more blocks than are full.
            NotFoundError: the sender is not paired.
            ResourceExhaustedError: the peer is at its cap, the queue is full, or the wait too long.
            EpdError: the transfer is over; this says why.
        """
        if token_count < 1:
            raise InvalidRequestError("a prompt has tokens", field="token_count")
        if len(block_hashes) > token_count // self._layout.block_size:
            raise InvalidRequestError(
                f"{len(block_hashes)} blocks cannot be full with {token_count} tokens",
                field="block_hashes",
            )
        self._check_paired(sender_instance_id)
        count = self._layout.blocks_for(token_count)
        lease = self.leases.admit(transfer_id, sender_instance_id, count)
        if lease is None:

            def grant() -> Lease | None:
                known = self.leases.get(transfer_id)
                granted = self.leases.grant(transfer_id, sender_instance_id, count, block_hashes)
                if granted is not None and known is None:
                    if self._follows_layers(token_count):
                        granted.arrival = KvArrival(self._layout.layer_count)
                    self._agent.announce()  # withdrawn when it is sealed or ends
                    self._plans.begin(granted)
                return granted

            lease = await self._queue.wait(transfer_id, sender_instance_id, grant)
        await self._plans.in_force(lease)
        return Reservation(
            transfer_id,
            lease.generation,
            lease.block_ids,
            self._slots.segment_of(lease.seal_slot),
            lease.cached_block_count,
            self.config.leases.progress_timeout_s,
            checksum=self._verifier is not None,
            layer_notices=lease.arrival is not None,
        )

    def announce(
        self, transfer_id: str, generation: int, first_token: int, writes_per_layer: int
    ) -> None:
        """Prefill has drawn the first token; so many WRITEs of each layer are all. A transfer that
        is over, of another reservation, announced already or whose seal is here is past caring:
        the seal is compared with what was announced once, when it comes.
        """
        lease = self.leases.get(transfer_id)
        if (
            lease is None
            or lease.arrival is None
            or lease.generation != generation
            or lease.announced_token is not None
            or lease.record is not None
            or lease.state not in (LeaseState.RESERVED, LeaseState.RECEIVING)
        ):
            return
        lease.announced_token = first_token
        lease.arrival.expect(writes_per_layer)
        if (waiter := self._announced.get(transfer_id)) is not None:
            waiter.set()

    def renew(self, transfer_ids: Iterable[str]) -> list[str]:
        """Notes progress; returns the transfers that are given up or not known."""
        unknown = self.leases.renew(transfer_ids)
        if unknown:
            log.info("renewal of transfers that are over: %s", ", ".join(unknown))
        return unknown

    def fail(self, transfer_id: str, error: EpdError, settled: bool) -> None:
        """Prefill says that a transfer failed. Idempotent; may come before Reserve."""
        self._queue.drop(transfer_id, error)
        self.leases.fail(transfer_id, error, settled)
        self._wake(transfer_id, error)

    def settle(self, transfer_ids: Iterable[str]) -> None:
        """Prefill confirms that it is through with transfers, whose Fail may have been lost."""
        transfer_ids = list(transfer_ids)
        self.leases.settle(transfer_ids)
        for transfer_id in transfer_ids:
            over = self.leases.ended(transfer_id)
            if over is not None:
                self._queue.drop(transfer_id, over)
                self._wake(transfer_id, over)

    def cancel(self, transfer_id: str, error: EpdError | None = None) -> None:
        """Nobody here wants the transfer (any more): a late Reserve of it is refused."""
        self.leases.cancel(transfer_id, error)
        over = self.leases.ended(transfer_id)
        if over is not None:
            self._queue.drop(transfer_id, over)
            self._wake(transfer_id, over)

    async def wait_sealed(self, transfer_id: str, timeout_s: float) -> SealedTransfer:
        """Waits until a transfer is complete; may be called before or after its Reserve.

        Whatever ends the wait early (timeout, cancellation) cancels the transfer. After a normal
        return call :meth:`take` before anything is awaited.

        Args:
            transfer_id: The attempt; one waiter each.
            timeout_s: Longest wait.

        Raises:
            DataLossError: the KV here is not what was sent.
            EpdError: why the transfer failed.
        """
        over = self.leases.ended(transfer_id)
        if over is not None:
            raise over.with_traceback(None)
        lease = self.leases.get(transfer_id)
        assert transfer_id not in self._waiting, "one Decode call per transfer"
        sealed = self._waiting[transfer_id] = asyncio.get_running_loop().create_future()
        try:
            if lease is not None and lease.state is LeaseState.SEALED:
                sealed.set_result(lease)
            async with asyncio.timeout(timeout_s):
                lease = await sealed
            if self._verifier is not None:
                await self._verifier.check(lease)
                over = self.leases.ended(transfer_id)  # it may have expired meanwhile
                if over is not None:
                    raise over.with_traceback(None)
        except DataLossError as loss:
            self.cancel(transfer_id, loss)
            raise
        except TimeoutError:
            held = self.leases.get(transfer_id)
            far = held.describe(self._layout.layer_count) if held else "prefill never reserved"
            error = TransferFailedError(
                f"KV push from prefill to decode not complete in {timeout_s} s: {far}",
                reason="TRANSFER_TIMEOUT",
            )
            self.cancel(transfer_id, error)
            raise error from None
        except asyncio.CancelledError:
            self.cancel(transfer_id)
            raise
        finally:
            del self._waiting[transfer_id]
        assert lease.record is not None
        return SealedTransfer(
            lease.block_ids,
            lease.cached_block_count,
            lease.record.first_token,
            lease.record.logprob,
            lease.record.byte_count,
        )

    async def wait_startable(self, transfer_id: str, step_s: Callable[[], float]) -> None:
        """Waits until what is still to arrive is predicted to take less than a step. Cancel it when
        that is of no use any more; afterwards call :meth:`lend` before anything is awaited.

        Args:
            transfer_id: The attempt; one waiter each.
            step_s: How long a step takes now; 0 is not known.
        """
        announced = self._announced[transfer_id] = asyncio.Event()
        try:
            lease = self.leases.get(transfer_id)
            if lease is None or lease.announced_token is None:
                await announced.wait()
            while True:
                lease = self.leases.get(transfer_id)
                arrival = lease.arrival if lease is not None else None
                left_s = arrival.remaining_s() if arrival is not None else None
                if left_s is not None and left_s < step_s():
                    return
                # The prediction gets better as layers come, so it is looked at half-way at most.
                half_s = self.config.tick_s if left_s is None else (left_s - step_s()) / 2
                await asyncio.sleep(min(max(half_s, 0.001), 4 * self.config.tick_s))
        finally:
            del self._announced[transfer_id]

    def lend(self, transfer_id: str) -> ArrivingTransfer | None:
        """Lets the engine begin on KV that still arrives; None when it is over. Afterwards either
        :meth:`take` or, when the engine has let go of the blocks, :meth:`give_back`.
        """
        lease = self.leases.lend(transfer_id)
        if lease is None:
            return None
        assert lease.announced_token is not None
        assert lease.arrival is not None
        return ArrivingTransfer(lease.block_ids, lease.announced_token, lease.arrival)

    def give_back(self, transfer_id: str) -> None:
        """The engine does not touch lent blocks any more; fine when they are taken."""
        self.leases.give_back(transfer_id)

    def take(self, transfer_id: str) -> tuple[int, ...]:
        """Hands the blocks of a sealed transfer over to the caller, for the engine.

        Raises:
            NotFoundError: no sealed transfer has that id.
        """
        return self.leases.take(transfer_id).block_ids

    def _follows_layers(self, token_count: int) -> bool:
        """Whether decode may begin early. An early step writes behind the prompt; where that is in
        the last pushed block, its digest would not be what was sent.
        """
        own_block = token_count % self._layout.block_size == 0
        return self.config.early_start and (self._verifier is None or own_block)

    def _check_paired(self, instance_id: str) -> None:
        if instance_id not in self.arrivals.agent_names:
            raise NotFoundError(
                f"prefill instance {instance_id} is not paired with this worker",
                reason="NOT_PAIRED",
            )

    def _on_complete(self, lease: Lease) -> None:
        self._agent.withdraw()
        self._plans.end(lease)
        waiter = self._waiting.get(lease.transfer_id)
        if waiter is not None and not waiter.done():
            waiter.set_result(lease)

    def _on_end(self, lease: Lease, error: EpdError) -> None:
        if not lease.complete:  # else that was done when it was sealed
            self._agent.withdraw()
            self._plans.end(lease)
        self._wake(lease.transfer_id, error)

    def _wake(self, transfer_id: str, error: EpdError) -> None:
        waiter = self._waiting.get(transfer_id)
        if waiter is not None and not waiter.done():
            waiter.set_exception(error.with_traceback(None))
