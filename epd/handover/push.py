"""One KV push from prefill to decode."""

import asyncio
import logging
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import Protocol

from epd.engine.kv_layout import KvLayout
from epd.engine.requests import LayerProgress
from epd.errors import EpdError, InternalError, NotPostedError, TransferFailedError
from epd.handover.block_runs import KvRoute
from epd.handover.control import PushTarget, Reservation
from epd.handover.layer_batch import LayerBatch
from epd.handover.layer_digests import BlockReader, LayerDigests
from epd.handover.notice import Notice, NoticeKind
from epd.handover.seal import SealRecord, SealSlots
from epd.handover.sender_config import PushTime, SenderConfig
from epd.handover.step_segments import StepSegments
from epd.handover.write_ledger import SEAL, WriteLedger
from epd.transfer.base import AgentDescriptor, TransferResult
from epd.transfer.job import UnreleasedTransferError
from epd.transfer.order import TransferContent

log = logging.getLogger(__name__)


class Writer(Protocol):
    """The part of the transfer agent that a push needs."""

    def write_late(
        self, peer: str, content: Callable[[], TransferContent], guard: Callable[[], None]
    ) -> Future[TransferResult]:
        """Queues a WRITE; asks for its content when its turn has come."""

    def reconnect(self, peer: AgentDescriptor) -> Future[None]:
        """Makes the connection to a peer anew once nothing is in flight there."""


class KvPush:
    """Says which WRITEs a push consists of and whether it may go on.

    :meth:`write_layer` belongs to the engine thread, completion of WRITEs to the agent thread,
    everything else to the event loop. After :meth:`close` nothing new is posted.
    """

    def __init__(
        self,
        request_id: str,
        target: PushTarget,
        reservation: Reservation,
        layout: KvLayout,
        route: KvRoute,
        writer: Writer,
        slots: SealSlots,
        slot: int,
        asked_ns: int,
        on_failure: Callable[["KvPush"], None],
        read_block: BlockReader | None,
        config: SenderConfig,
        seal_joins: bool,
    ) -> None:
        """Takes over the seal slot ``slot``. ``asked_ns``: monotonic time before Reserve, when the
        lease began at the earliest. ``on_failure``: called on the loop once a WRITE has failed.
        ``read_block`` is used when decode has asked for checksums. ``seal_joins``: the seal can be
        part of a WRITE of KV.
        """
        self.request_id = request_id
        self.target = target
        self.reservation = reservation
        self.writes = WriteLedger(layout.layer_count)
        #: Why nothing more is posted.
        self.error: EpdError | None = None
        #: Done once the push has failed, for whoever waits for something else meanwhile.
        self.failure: asyncio.Future[EpdError] = asyncio.get_running_loop().create_future()
        self.finished = False
        #: Decode needs no Fail: it has been told, has given up itself, or is gone.
        self.told = False
        #: WRITEs ran when decode was lost: that the library has let go of them proves nothing.
        self.cut_off = False
        self._layout = layout
        self._route = route
        self._writer = writer
        self._slots = slots
        self._slot = slot
        self._on_failure = on_failure
        self._loop = asyncio.get_running_loop()
        self._renewed_ns = asked_ns
        self._merge_bytes = 0 if reservation.layer_notices else config.merge_bytes
        self._push_time = config.push_time
        self._seal_joins = seal_joins and self._merge_bytes > 0
        # Between closing and counting a new WRITE as open, and around the batch.
        self._lock = threading.Lock()
        #: KV that the agent has not asked for yet.
        self._batch: LayerBatch | None = None
        # Engine thread only.
        self._pushed_until = [reservation.cached_block_count] * layout.layer_count
        self._chunk = (0, 0)
        self._step = StepSegments(route, (), (), layout.layer_count)
        #: How many WRITEs of each layer there were; all once the engine is through.
        self.writes_per_layer = 0
        self._held_back: LayerProgress | None = None
        self._digests: LayerDigests | None = None
        if reservation.checksum:
            assert read_block is not None
            self._digests = LayerDigests(layout.layer_count, read_block)

    @property
    def transfer_id(self) -> str:
        """Id of the attempt."""
        return self.reservation.transfer_id

    def write_layer(self, layer: int, progress: LayerProgress) -> None:
        """Pushes what is complete of a layer and not pushed yet. Engine thread; never waits.

        A block goes once it is full, the last one with the prompt's last token. What came from
        the prefix cache is final in every layer, so it goes with the first step.
        """
        if self._push_time is PushTime.AFTER:
            self._held_back = progress
        elif self.error is None:
            self._write_complete(layer, progress)

    def write_held_back(self) -> None:
        """Pushes what :meth:`write_layer` has kept for later. After the engine's last call."""
        if self._held_back is not None:
            for layer in range(self._layout.layer_count):
                self._write_complete(layer, self._held_back)

    def _write_complete(self, layer: int, progress: LayerProgress) -> None:
        if progress.computed_after == progress.prompt_len:
            end = self._layout.blocks_for(progress.prompt_len)
        else:
            end = progress.computed_after // self._layout.block_size
        begin = self._pushed_until[layer]
        if end <= begin:
            return
        if self._chunk != (begin, end):  # the same for all layers of a step
            self._chunk = (begin, end)
            self.writes_per_layer += 1
            self._step = StepSegments(
                self._route,
                progress.block_ids[begin:end],
                self.reservation.block_ids[begin:end],
                self._layout.layer_count,
            )
        self._pushed_until[layer] = end
        if self._digests is not None:
            self._digests.update(layer, progress.block_ids[begin:end])
        self._write_kv(layer)

    def write_seal(self, first_token: int, logprob: float) -> None:
        """Posts the seal. Loop, after the engine has called for every layer of the last step.

        It leaves with the last layers when those still wait for the agent.
        """
        blocks = len(self.reservation.block_ids)
        behind = [layer for layer, until in enumerate(self._pushed_until) if until != blocks]
        if behind:
            self.close(InternalError(f"sealed with layers {behind} not pushed"))
        record = SealRecord(
            self.transfer_id,
            self.reservation.generation,
            first_token,
            logprob,
            self.writes.kv_writes,
            self.writes.kv_bytes,
            self._digests.digests() if self._digests else (),
        )
        source = self._slots.write(self._slot, record.encode())
        with self._lock:
            if self.error is not None:
                return
            if self._batch is not None and self._seal_joins:
                self._batch.seal = source
                return
            self.writes.opened(0)
        notice = self._notice(NoticeKind.SEAL, record.write_count, SEAL)
        content = TransferContent([source], [self.reservation.seal], notice)
        self._post(lambda: content, lambda: ("seal", SEAL))

    def give_back_slot(self) -> None:
        """Ends the use of the seal slot, when nothing is in flight any more."""
        assert not self.writes.in_flight
        self._slots.give_back(self._slot)

    def close(self, error: EpdError) -> None:
        """Forbids new posts; the first reason stays. Any thread."""
        with self._lock:
            self.error = self.error or error

    def renewed(self, asked_ns: int) -> None:
        """Decode still held the lease some time after ``asked_ns``."""
        self._renewed_ns = max(self._renewed_ns, asked_ns)

    def _write_kv(self, layer: int) -> None:
        """One layer of the chunk, with others if it has to wait anyway."""
        with self._lock:
            if self.error is not None:
                return
            batch = self._batch
            if batch and batch.takes(layer, self._step, self._merge_bytes):
                batch.add_next()
                self.writes.grown(self._step.layer_bytes)
                return
            ordinal = self.writes.opened(self._step.layer_bytes)
            batch = LayerBatch(self._step, range(layer, layer + 1), ordinal)
            self._batch = batch
        self._post(lambda: self._take(batch), lambda: (batch.title, batch.layers))

    def _take(self, batch: LayerBatch) -> TransferContent:
        """Agent thread: what a batch has come to; nothing joins it any more."""
        batch.step.prepare()  # takes a while, in which further layers and the seal may join
        with self._lock:
            if self._batch is batch:
                self._batch = None
        local, remote = batch.step.of_layers(batch.layers)
        if batch.seal is None:
            notice = self._notice(NoticeKind.KV, batch.ordinal, batch.layers)
            return TransferContent(local, remote, notice)
        notice = self._notice(NoticeKind.SEALED_KV, batch.ordinal, batch.layers)
        local, remote = local.with_last(batch.seal), remote.with_last(self.reservation.seal)
        return TransferContent(local, remote, notice)

    def _notice(self, kind: NoticeKind, ordinal: int, layers: range) -> bytes:
        generation = self.reservation.generation
        notice = Notice(kind, self.transfer_id, generation, ordinal, layers.start, len(layers))
        return notice.encode()

    def _post(
        self, content: Callable[[], TransferContent], what: Callable[[], tuple[str, range]]
    ) -> None:
        """Hands a WRITE that is counted as open to the agent. ``what`` names it when it has ended:
        a title for errors and its layers.
        """
        name = self.target.agent.agent_name
        future = self._writer.write_late(name, content, self._guard)
        future.add_done_callback(lambda done: self._on_done(*what(), done))

    def _guard(self) -> None:
        """Agent thread, before each post: the lease must hold. A process that was stopped for long
        finds here that it has lost it.
        """
        if self.error is not None:
            raise self.error
        silent_s = (time.monotonic_ns() - self._renewed_ns) / 1e9
        if silent_s > self.reservation.progress_timeout_s:
            raise TransferFailedError(
                f"lease not renewed for {silent_s:.1f} s, it lasts "
                f"{self.reservation.progress_timeout_s} s",
                reason="LEASE_LAPSED",
            )

    def _on_done(self, title: str, layers: range, done: Future[TransferResult]) -> None:
        """Agent thread, or whichever thread found the agent dead."""
        error = done.exception()
        if error is None:
            self.writes.done(layers, done.result())
        elif self._note_failure(title, error):
            self._loop.call_soon_threadsafe(self._on_failure, self)
        if isinstance(error, UnreleasedTransferError):
            error.released.add_done_callback(lambda _: self.writes.ended())
        else:
            self.writes.ended()

    def _note_failure(self, title: str, error: BaseException) -> bool:
        """True when it is the push's first failure."""
        typed = error if isinstance(error, EpdError) else InternalError(repr(error))
        with self._lock:
            if self.error is not None:
                return False
            if not isinstance(error, NotPostedError):
                # The connection may stay broken. Asked for at once, so that what failed together
                # asks for one new connection, and under the lock: a peer that is lost meanwhile
                # is disconnected after this.
                self._writer.reconnect(self.target.agent).add_done_callback(_log_failure)
            self.error = TransferFailedError(
                f"KV push from prefill to decode, {title}: {typed.message}", reason=typed.reason
            )
        return True


def _log_failure(connecting: Future[None]) -> None:
    if (error := connecting.exception()) is not None:
        log.warning("no new connection: %s", error)
