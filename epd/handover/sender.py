"""The prefill side of the KV hand-over."""

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

from epd.engine.kv_layout import KvLayout
from epd.engine.requests import LayerProgress
from epd.errors import (
    DuplicateRequestError,
    EpdError,
    InternalError,
    RequestCancelledError,
    ResourceExhaustedError,
    TransferFailedError,
    UnavailableError,
    UnsupportedFeatureError,
)
from epd.handover.block_runs import KvRoute
from epd.handover.call_per_target import CallPerTarget
from epd.handover.control import PushTarget, Reservation
from epd.handover.layer_digests import BlockReader
from epd.handover.push import KvPush
from epd.handover.push_control import PushControl
from epd.handover.seal import SealSlots
from epd.handover.sender_config import PushTime, SenderConfig
from epd.handover.sender_counters import SenderCounters
from epd.handover.write_ledger import PushReport
from epd.transfer.agent import TransferAgent

log = logging.getLogger(__name__)


class KvSender:
    """Pushes the KV of prompts to decode workers while it is being computed.

    Lives on one event loop; :meth:`on_layer` is the engine's layer hook and runs on the engine
    thread.

    Args:
        agent: Started, with the KV memory and ``slots.segment`` registered.
        layout: This worker's KV, with its regions.
        slots: Source memory of seals, one for each push that can be open at once, with room for a
            digest per layer.
        config: Bounds.
        read_block: Reads this worker's KV, for decode workers that ask for checksums.
        host_kv: The KV lies in host memory, as seals always do.
    """

    def __init__(
        self,
        agent: TransferAgent,
        layout: KvLayout,
        slots: SealSlots,
        config: SenderConfig | None = None,
        read_block: BlockReader | None = None,
        host_kv: bool = True,
    ) -> None:
        self.config = config or SenderConfig()
        self.counters = SenderCounters()
        self._agent = agent
        self._layout = layout
        self._slots = slots
        self._read_block = read_block
        self._host_kv = host_kv
        self._routes: dict[str, KvRoute] = {}  # by instance id of the target
        self._pushes: dict[str, KvPush] = {}  # by request id; the engine thread looks up only
        self._control = PushControl(self.config.control_timeout_s, self.config.max_unsettled)

    @property
    def open_pushes(self) -> int:
        """Pushes between Reserve and the end of their last WRITE."""
        return len(self._pushes)

    @property
    def unsettled_transfers(self) -> int:
        """Transfers that are through here while their decode worker does not know yet."""
        return len(self._control.settlements)

    async def run(self) -> None:
        """Renews leases and delivers Settles, until cancelled.

        No tick waits for the calls of an earlier one: a decode worker that hangs would hold up the
        renewals of all others. One Renew and one Settle to each worker are under way at most.
        """
        async with asyncio.TaskGroup() as group:
            renewals, settles = CallPerTarget(group), CallPerTarget(group)
            while True:
                await asyncio.sleep(self.config.renew_interval_s)
                for instance_id, pushes in self._renewable().items():
                    renewals.start(instance_id, partial(self._renew, pushes))
                for target, transfer_ids in self._control.settlements.due():
                    tell = partial(self._control.settle, target, transfer_ids)
                    settles.start(target.instance_id, tell)

    def on_layer(self, layer: int, progress: Sequence[LayerProgress]) -> None:
        """The engine's layer hook: pushes what a layer of a step has made complete.

        Engine thread, or one that this one waits for. Computes runs of blocks and queues WRITEs;
        never waits.
        """
        for one in progress:
            push = self._pushes.get(one.request_id)
            if push is None:  # it has ended, the engine's request is about to
                self.counters.layers_without_push += 1
            else:
                push.write_layer(layer, one)

    @asynccontextmanager
    async def push(
        self,
        request_id: str,
        transfer_id: str,
        target: PushTarget,
        token_count: int,
        block_hashes: Sequence[bytes] = (),
        release: Callable[[], None] = lambda: None,
    ) -> AsyncIterator[KvPush]:
        """Reserves decode memory, then pushes every layer of ``request_id`` until left.

        Submit the request to the engine inside and await :meth:`finish` after its PrefillDone.
        Leaving without it gives the transfer up: decode is told why at once. The exit waits until
        nothing is in flight (at most ``drain_timeout_s``). ``KvPush.failure`` completes when a push
        fails meanwhile.

        ``release`` frees the engine's blocks. It is called once, when no WRITE reads them any more:
        before the exit ends, or later when that is cut short by a cancel or its timeout. Not called
        when nothing was reserved.

        ``request_id`` is the engine's and must be new for each attempt. ``block_hashes`` name the
        prompt's leading full blocks: what decode holds of them is not pushed.

        Raises:
            EpdError: why Reserve was refused.
            DuplicateRequestError: a push of this request or transfer is open.
            ResourceExhaustedError: no seal slot is free.
        """
        if request_id in self._pushes:
            raise DuplicateRequestError(f"a push of request {request_id} is open")
        if any(push.transfer_id == transfer_id for push in self._pushes.values()):
            # Decode refuses its Reserve, and would be told that nothing of the transfer runs.
            raise DuplicateRequestError(f"a push of transfer {transfer_id} is open")
        slot = self._slots.take()
        if slot is None:
            raise ResourceExhaustedError(f"{self._slots.count} pushes are open already")
        asked_ns = time.monotonic_ns()
        try:
            reservation = await self._reserve(transfer_id, target, token_count, block_hashes)
        except BaseException:
            self._slots.give_back(slot)
            raise
        push = KvPush(
            request_id,
            target,
            reservation,
            self._layout,
            self._routes.get(target.instance_id) or KvRoute(self._layout, target.layout),
            self._agent,
            self._slots,
            slot,
            asked_ns,
            self._on_failure,
            self._read_block,
            self.config,
            # One WRITE has one kind of memory on either side.
            seal_joins=self._host_kv and target.agent.memory_kind == "DRAM",
        )
        self._pushes[request_id] = push
        try:
            # A push counts its lease's age from when it was asked for. One that has waited long for
            # decode's memory would be too old for its first WRITE.
            waited_s = (time.monotonic_ns() - asked_ns) / 1e9
            if waited_s > reservation.progress_timeout_s / 4:
                await self._renew([push])
            yield push
        except BaseException as error:
            self._fail(push, _typed(error))
            raise
        finally:
            if not push.finished:
                self._fail(push, RequestCancelledError("prefill ended without handing over the KV"))
            # Goes on when this caller is cancelled (again) or out of patience: slot, settlement and
            # the source blocks depend on it. A WRITE that read another request's KV, with the seal
            # ahead of it, would be sealed at decode as this one's.
            closing = self._control.tasks.spawn(self._close(push, release))
            try:
                await asyncio.wait({closing}, timeout=self.config.drain_timeout_s)
            finally:
                if push.writes.in_flight:
                    self.counters.undrained += 1
                    log.error("WRITEs of %s still run, holding their source", push.transfer_id)

    async def finish(
        self, push: KvPush, first_token: int, logprob: float, forward_ended_ns: int
    ) -> PushReport:
        """Seals a push after the engine's PrefillDone and waits until everything has arrived, or
        until something has failed: the exit, whose wait is bounded, waits for what still runs.

        Args:
            push: The push.
            first_token: The token drawn after the prompt.
            logprob: Its log probability.
            forward_ended_ns: Monotonic time of the forward pass's end.

        Raises:
            EpdError: the push has failed.
        """
        if self.config.push_time is PushTime.AFTER:
            await asyncio.to_thread(push.write_held_back)
        if push.reservation.layer_notices and push.error is None:
            self._control.announce(push, first_token)
        push.write_seal(first_token, logprob)
        drained = asyncio.create_task(push.writes.drained())
        either: set[asyncio.Future[Any]] = {drained, push.failure}
        try:
            await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
        finally:
            drained.cancel()
        if push.error is not None:
            raise push.error.with_traceback(None)
        push.finished = True
        self.counters.pushed += 1
        return push.writes.report(forward_ended_ns)

    async def close(self, timeout_s: float) -> None:
        """Gives open pushes up and waits until decode workers have been told, at the process's end.
        The agent must still run.
        """
        for push in self._pushes.values():
            self._fail(push, UnavailableError("the prefill worker is shutting down"))
        await self._control.tasks.drain(timeout_s)

    def peer_arrived(self, target: PushTarget) -> None:
        """A decode process is paired (again)."""
        self._routes[target.instance_id] = KvRoute(self._layout, target.layout)
        self._control.settlements.connected(target)

    def peer_gone(self, target: PushTarget) -> None:
        """A decode process is gone: its pushes fail at once and it is told nothing."""
        self._routes.pop(target.instance_id, None)
        for push in self._pushes.values():
            if push.target.instance_id == target.instance_id:
                push.told = True
                push.cut_off = push.cut_off or push.writes.in_flight > 0
                text = f"decode instance {target.instance_id} was lost during the KV push"
                self._fail(push, UnavailableError(text, reason="PEER_LOST"))
        self._control.settlements.lost(target)

    async def _reserve(
        self,
        transfer_id: str,
        target: PushTarget,
        token_count: int,
        block_hashes: Sequence[bytes],
    ) -> Reservation:
        try:
            async with asyncio.timeout(self.config.reserve_timeout_s):
                reservation = await target.control.reserve(transfer_id, token_count, block_hashes)
            blocks = self._layout.blocks_for(token_count)
            if len(reservation.block_ids) != blocks:
                raise InternalError(f"{len(reservation.block_ids)} blocks reserved, not {blocks}")
            if reservation.checksum and self._read_block is None:
                raise UnsupportedFeatureError("this prefill worker makes no checksums")
        except BaseException as error:
            # Decode may have granted it all the same, or be about to.
            typed = _typed(error)
            if not isinstance(error, DuplicateRequestError):  # then it is another worker's
                self._control.fail(target, transfer_id, typed, settled=True)
            if isinstance(error, TimeoutError):
                raise typed from None
            raise
        return reservation

    async def _close(self, push: KvPush, release: Callable[[], None]) -> None:
        """Ends a closed or finished push, however long its WRITEs run: only their own end says that
        its memory may be used again.
        """
        await push.writes.drained()
        release()
        push.give_back_slot()
        del self._pushes[push.request_id]
        # Left with a peer that hangs, a WRITE over TCP ends here and lands there once it goes on:
        # decode's memory is not settled as soon as this side's is.
        settled_in_s = self.config.lost_write_s if push.cut_off else 0.0
        self._control.settlements.add(push.target, push.transfer_id, settled_in_s)
        if not push.finished:  # decode holds memory back until it knows; others wait for the tick
            told = self._control.settle(push.target, [push.transfer_id])
            self._control.tasks.spawn(told)  # whoever waits here holds engine blocks

    def _on_failure(self, push: KvPush) -> None:
        assert push.error is not None
        self._fail(push, push.error)

    def _fail(self, push: KvPush, error: EpdError) -> None:
        """Stops a push for good and tells decode why. The first reason counts."""
        push.close(error)
        assert push.error is not None
        if push.failure.done() or push.finished:
            return
        push.failure.set_result(push.error)
        self.counters.failed += 1
        log.info("push %s failed: %s", push.transfer_id, push.error.message)
        if not push.told:
            push.told = True
            settled = not push.writes.in_flight
            self._control.fail(push.target, push.transfer_id, push.error, settled)

    def _renewable(self) -> dict[str, list[KvPush]]:
        """Live pushes by target; one that does not move is failed instead of renewed."""
        by_target: dict[str, list[KvPush]] = {}
        for push in self._pushes.values():
            stalled_s = push.writes.stalled_s
            if stalled_s > push.reservation.progress_timeout_s:
                # Renewing it would keep decode waiting for what does not move.
                text = f"KV push from prefill to decode: no WRITE ended for {stalled_s:.1f} s"
                self._fail(push, TransferFailedError(text, reason="TRANSFER_STALLED"))
            elif push.error is None:
                by_target.setdefault(push.target.instance_id, []).append(push)
        return by_target

    async def _renew(self, pushes: list[KvPush]) -> None:
        for push in await self._control.renew(pushes):
            if not push.finished:
                push.told = True
                text = "decode has given up the KV push from prefill"
                self._fail(push, TransferFailedError(text, reason="LEASE_LOST"))


def _typed(error: BaseException) -> EpdError:
    if isinstance(error, EpdError):
        return error
    if isinstance(error, asyncio.CancelledError | GeneratorExit):
        return RequestCancelledError("the request was cancelled at prefill")
    if isinstance(error, TimeoutError):
        return TransferFailedError("decode did not answer Reserve in time")
    return InternalError(f"prefill failed: {error!r}")
