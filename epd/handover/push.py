"""One KV push from prefill to decode."""

import asyncio
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass

from epd.engine.kv_layout import KvLayout
from epd.engine.requests import LayerProgress
from epd.errors import EpdError, InternalError, TransferFailedError
from epd.handover.block_runs import BlockRun, block_runs, run_segments
from epd.handover.control import PushTarget, Reservation
from epd.handover.notice import Notice, NoticeKind
from epd.handover.push_timing import exposed_ns, hidden_ns
from epd.handover.seal import SealRecord, SealSlots
from epd.transfer.agent import TransferAgent
from epd.transfer.base import Segment, TransferResult
from epd.transfer.job import UnreleasedTransferError

SEAL_LAYER = -1


@dataclass(frozen=True)
class PushReport:
    """What a finished push moved, from the transfer library's telemetry; the seal is included.

    ``layer_ns``: summed time of the WRITEs of each layer, from posting to completion.
    """

    byte_count: int
    descriptor_count: int
    write_count: int
    exposed_ns: int
    hidden_ns: int
    layer_ns: tuple[int, ...]


@dataclass(frozen=True)
class _Write:
    layer: int
    started_ns: int
    ended_ns: int
    result: TransferResult


class KvPush:
    """State of one push.

    :meth:`write_layer` belongs to the engine thread, completion of WRITEs to the agent thread,
    everything else to the event loop; a lock guards what they share. Once :meth:`close` has been
    called nothing new is posted, and once :attr:`in_flight` is 0 nothing runs.
    """

    def __init__(
        self,
        request_id: str,
        target: PushTarget,
        reservation: Reservation,
        layout: KvLayout,
        agent: TransferAgent,
        slots: SealSlots,
        slot: int,
        asked_ns: int,
        on_failure: Callable[["KvPush"], None],
    ) -> None:
        """Takes over the seal slot ``slot``. ``asked_ns``: monotonic time before Reserve, when the
        lease began at the earliest. ``on_failure``: called on the loop once a WRITE has failed.
        """
        self.request_id = request_id
        self.target = target
        self.reservation = reservation
        self.error: EpdError | None = None
        #: Done once the push has failed, for whoever waits for something else meanwhile.
        self.failure: asyncio.Future[EpdError] = asyncio.get_running_loop().create_future()
        self.finished = False
        self.write_failed = False
        #: Decode needs no Fail: it has been told, has given up itself, or is gone.
        self.told = False
        self._idle = asyncio.Event()
        self._layout = layout
        self._agent = agent
        self._slots = slots
        self._slot = slot
        self._on_failure = on_failure
        self._loop = asyncio.get_running_loop()
        self._renewed_ns = asked_ns
        # Engine thread only.
        self._pushed_until = [reservation.cached_block_count] * layout.layer_count
        self._chunk: tuple[int, int] = (0, 0)
        self._chunk_runs: list[BlockRun] = []
        # Shared, under the lock.
        self._lock = threading.Lock()
        self._in_flight = 0
        self._posted = 0
        self._posted_bytes = 0
        self._moved_ns = 0
        self._done: list[_Write] = []

    @property
    def transfer_id(self) -> str:
        """Id of the attempt."""
        return self.reservation.transfer_id

    @property
    def in_flight(self) -> int:
        """WRITEs handed to the agent that have not ended."""
        return self._in_flight

    @property
    def stalled_s(self) -> float:
        """Seconds for which WRITEs have been open and none has ended."""
        with self._lock:
            return (time.monotonic_ns() - self._moved_ns) / 1e9 if self._in_flight else 0.0

    def write_layer(self, layer: int, progress: LayerProgress) -> None:
        """Pushes what is complete of a layer and not pushed yet. Engine thread; never waits.

        A block goes once it is full, the last one with the prompt's last token. What came from
        the prefix cache is final in every layer, so it goes with the first step.
        """
        if self.error is not None:
            return
        whole = progress.computed_after == progress.prompt_len
        size = self._layout.block_size
        end = (
            self._layout.blocks_for(progress.prompt_len)
            if whole
            else (progress.computed_after // size)
        )
        begin = self._pushed_until[layer]
        if end <= begin:
            return
        if self._chunk != (begin, end):  # the same for all layers of a step
            self._chunk = (begin, end)
            self._chunk_runs = block_runs(
                progress.block_ids[begin:end], self.reservation.block_ids[begin:end]
            )
        self._pushed_until[layer] = end
        local, remote = run_segments(self._chunk_runs, layer, self._layout, self.target.layout)
        self._write(layer, local, remote)

    def write_seal(self, first_token: int, logprob: float) -> None:
        """Posts the seal. Loop, after the engine has called for every layer of the last step."""
        blocks = len(self.reservation.block_ids)
        behind = [n for n, until in enumerate(self._pushed_until) if until != blocks]
        if behind and self.error is None:
            self.close(InternalError(f"sealed with layers {behind} not pushed"))
        with self._lock:
            record = SealRecord(
                self.transfer_id,
                self.reservation.generation,
                first_token,
                logprob,
                self._posted,
                self._posted_bytes,
            )
        self._slots.write(self._slot, record.encode())
        self._write(SEAL_LAYER, [self._slots.segment_of(self._slot)], [self.reservation.seal])

    def give_back_slot(self) -> None:
        """Ends the use of the seal slot, when nothing is in flight any more."""
        assert not self._in_flight
        self._slots.give_back(self._slot)

    def close(self, error: EpdError) -> None:
        """Forbids new posts; the first reason stays. Any thread."""
        with self._lock:
            self.error = self.error or error

    async def drained(self) -> None:
        """Waits until nothing is in flight; for good once :meth:`close` has been called."""
        while self._in_flight:
            self._idle.clear()
            if self._in_flight:  # the last one may have ended just before the clear
                await self._idle.wait()

    def renewed(self, asked_ns: int) -> None:
        """Decode still held the lease some time after ``asked_ns``."""
        self._renewed_ns = max(self._renewed_ns, asked_ns)

    def report(self, forward_ended_ns: int) -> PushReport:
        """Totals; complete once nothing is in flight."""
        intervals = [(one.started_ns, one.ended_ns) for one in self._done]
        layer_ns = [0] * self._layout.layer_count
        for one in self._done:
            if one.layer != SEAL_LAYER:
                layer_ns[one.layer] += one.result.transfer_ns
        return PushReport(
            sum(one.result.byte_count for one in self._done),
            sum(one.result.descriptor_count for one in self._done),
            len(self._done),
            exposed_ns(intervals, forward_ended_ns),
            hidden_ns(intervals, forward_ended_ns),
            tuple(layer_ns),
        )

    def _write(self, layer: int, local: list[Segment], remote: list[Segment]) -> None:
        with self._lock:
            if self.error is not None:
                return
            ordinal = self._posted
            if layer != SEAL_LAYER:
                self._posted += 1
                self._posted_bytes += sum(one.length for one in local)
            if not self._in_flight:
                self._moved_ns = time.monotonic_ns()
            self._in_flight += 1
        kind = NoticeKind.SEAL if layer == SEAL_LAYER else NoticeKind.KV
        notice = Notice(kind, self.transfer_id, self.reservation.generation, ordinal, max(layer, 0))
        future = self._agent.write(
            self.target.agent.agent_name, local, remote, notice.encode(), self._guard
        )
        future.add_done_callback(lambda done: self._on_done(layer, done))

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

    def _on_done(self, layer: int, done: Future[TransferResult]) -> None:
        """Agent thread (or whichever thread found the agent dead)."""
        error = done.exception()
        failed = False
        if error is None:
            result = done.result()
            now = time.monotonic_ns()
            write = _Write(layer, now - result.transfer_ns, now, result)
            with self._lock:
                self._done.append(write)
        else:
            where = "seal" if layer == SEAL_LAYER else f"layer {layer}"
            typed = error if isinstance(error, EpdError) else InternalError(repr(error))
            with self._lock:
                failed = self.error is None
                if failed:
                    self.write_failed = True
                    self.error = TransferFailedError(
                        f"KV push from prefill to decode, {where}: {typed.message}",
                        reason=typed.reason,
                    )
        if isinstance(error, UnreleasedTransferError):
            error.released.add_done_callback(lambda _: self._end_one())
        else:
            self._end_one()
        if failed:
            self._loop.call_soon_threadsafe(self._on_failure, self)

    def _end_one(self) -> None:
        with self._lock:
            self._in_flight -= 1
            self._moved_ns = time.monotonic_ns()
            over = not self._in_flight
        if over:
            self._loop.call_soon_threadsafe(self._idle.set)
