"""The prefill side of the embedding hand-over: READs from encoders' memory."""

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from concurrent.futures import Future
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from epd.errors import EpdError, RequestCancelledError, TransferFailedError
from epd.handover.control import EncoderControl
from epd.handover.embedding_handle import EmbeddingHandle
from epd.handover.embedding_memory import EmbeddingMemory
from epd.handover.encoder_leases import EncoderLeases
from epd.handover.peers import PeerTable
from epd.transfer.agent import TransferAgent
from epd.transfer.arena import ByteRange
from epd.transfer.base import Segment, TransferResult
from epd.transfer.job import UnreleasedTransferError

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class ReadEmbedding:
    """One image's embedding in this process: ``shape`` elements of ``dtype`` at ``address``.

    ``data`` are the same bytes; both are valid until the context that gave them is left.
    """

    address: int
    data: npt.NDArray[np.uint8]
    shape: tuple[int, ...]
    dtype: str


@dataclass(frozen=True)
class ReadReport:
    """What the READs of one request moved; ``wait_ns`` is the wait for memory before them."""

    byte_count: int
    descriptor_count: int
    wait_ns: int
    read_ns: int


class _Reads:
    """The READs of one request. ``closed`` forbids new posts; read by the agent thread."""

    def __init__(self) -> None:
        self.closed: EpdError | None = None
        self.futures: list[Future[TransferResult]] = []

    def guard(self) -> None:
        if self.closed is not None:
            raise self.closed

    @property
    def settled(self) -> bool:
        return all(future.done() and not _unreleased(future) for future in self.futures)

    async def drained(self) -> None:
        """Waits until no READ runs."""
        for future in self.futures:
            await asyncio.gather(asyncio.wrap_future(future), return_exceptions=True)
            unreleased = _unreleased(future)
            if unreleased is not None:
                await asyncio.wrap_future(unreleased.released)


class EmbeddingReader:
    """Fetches the embeddings of a request, all or none, into bounded memory.

    Owned by one event loop.

    Args:
        agent: Started, with ``memory.segment`` registered.
        memory: Where embeddings go.
        control: Control calls to the encoder at an address.
        control_timeout_s: Bound of one control call.
        max_encoders: Most encoders kept connected.
    """

    def __init__(
        self,
        agent: TransferAgent,
        memory: EmbeddingMemory,
        control: Callable[[str], EncoderControl],
        control_timeout_s: float = 5.0,
        max_encoders: int = 256,
    ) -> None:
        self._agent = agent
        self._memory = memory
        self._control = control
        self._control_timeout_s = control_timeout_s
        self._peers = PeerTable(agent, max_encoders)
        self._tasks: set[asyncio.Task[Any]] = set()

    @asynccontextmanager
    async def read(
        self, handles: Sequence[EmbeddingHandle]
    ) -> AsyncIterator[tuple[tuple[ReadEmbedding, ...], ReadReport]]:
        """Yields one embedding per handle, in order; on exit their memory is given back, so leave
        only when the engine no longer uses it. The encoders' leases are renewed while this waits
        and reads, and released on every path, with the truth about running READs.

        Raises:
            InvalidRequestError: a handle contradicts itself.
            ResourceExhaustedError: no room in time, or never so much room.
            NotFoundError: an encoder does not know a handle (any more).
            TransferFailedError: a READ failed; the text names hop and image.
        """
        for index, handle in enumerate(handles):
            handle.check(f"images[{index}].handle")
        leases = EncoderLeases(handles, self._control, self._control_timeout_s)
        reads = _Reads()
        ranges: list[ByteRange] = []
        started = time.monotonic_ns()
        try:
            async with asyncio.TaskGroup() as group:
                renewing = group.create_task(leases.renew_on())
                if handles:
                    ranges = await self._memory.hold([handle.byte_count for handle in handles])
                held = time.monotonic_ns()
                try:
                    results = await self._read_all(handles, ranges, reads)
                except TransferFailedError:
                    await leases.confirm()  # an unknown handle explains it better
                    raise
                await leases.confirm()
                renewing.cancel()
        except BaseException as error:
            # A group's first error is the cause, the others follow from its cancellations.
            cause = error.exceptions[0] if isinstance(error, BaseExceptionGroup) else error
            reads.closed = _typed(cause)
            self._give_up(leases, reads, ranges)
            raise cause from cause.__cause__
        self._spawn(leases.release(settled=True))
        report = ReadReport(
            sum(result.byte_count for result in results),
            sum(result.descriptor_count for result in results),
            held - started,
            time.monotonic_ns() - held,
        )
        try:
            yield tuple(map(self._embedding, handles, ranges)), report
        finally:
            self._memory.free(ranges)

    async def _read_all(
        self, handles: Sequence[EmbeddingHandle], ranges: Sequence[ByteRange], reads: _Reads
    ) -> list[TransferResult]:
        async with AsyncExitStack() as connections:
            for index, (handle, held) in enumerate(zip(handles, ranges, strict=True)):
                hop = f"embedding READ from encoder {handle.encoder_address}, image {index}"
                try:
                    peer = await connections.enter_async_context(
                        self._peers.use(handle.encoder_address, handle.agent)
                    )
                except TransferFailedError as error:
                    raise TransferFailedError(f"{hop}: {error.message}") from error
                local = _split(self._memory.part(held), handle.segments)
                reads.futures.append(
                    self._agent.read(peer, local, handle.segments, guard=reads.guard)
                )
            # Waiting on these cancels no READ, and the first failure ends the wait.
            waits = [asyncio.wrap_future(future) for future in reads.futures]
            for wait in waits:
                wait.add_done_callback(_retrieve)
            if waits:
                await asyncio.wait(waits, return_when=asyncio.FIRST_EXCEPTION)
            for index, (handle, wait) in enumerate(zip(handles, waits, strict=True)):
                cause = wait.exception() if wait.done() else None
                if isinstance(cause, EpdError):
                    self._peers.suspect(handle.encoder_address)
                    raise TransferFailedError(
                        f"embedding READ from encoder {handle.encoder_address}, image {index}: "
                        f"{cause.message}"
                    ) from cause
            return [wait.result() for wait in waits]

    def _give_up(self, leases: EncoderLeases, reads: _Reads, ranges: Sequence[ByteRange]) -> None:
        if reads.settled:
            self._memory.free(ranges)
            self._spawn(leases.release(settled=True))
        else:
            self._memory.quarantine(ranges)
            self._spawn(self._settle(leases, reads, ranges))

    async def _settle(
        self, leases: EncoderLeases, reads: _Reads, ranges: Sequence[ByteRange]
    ) -> None:
        """Tells the encoders at once that READs still run, and again when none does."""
        await leases.release(settled=False)
        await reads.drained()
        self._memory.settle(ranges)
        await leases.release(settled=True)

    def _embedding(self, handle: EmbeddingHandle, held: ByteRange) -> ReadEmbedding:
        return ReadEmbedding(
            self._memory.part(held).address, self._memory.view(held), handle.shape, handle.dtype
        )

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._reap)

    def _reap(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("a task of the embedding reader failed", exc_info=error)


def _split(whole: Segment, like: Sequence[Segment]) -> list[Segment]:
    """Cuts ``whole`` into neighbouring parts as long as those of ``like``."""
    parts, address = [], whole.address
    for one in like:
        parts.append(Segment(address, one.length, whole.device_id))
        address += one.length
    return parts


def _retrieve(wait: asyncio.Future[TransferResult]) -> None:
    """Keeps asyncio from reporting the failure of a READ that nobody waits for any more."""
    if not wait.cancelled():
        wait.exception()


def _unreleased(future: Future[TransferResult]) -> UnreleasedTransferError | None:
    if not future.done() or future.cancelled():
        return None
    error = future.exception()
    if isinstance(error, UnreleasedTransferError) and not error.released.done():
        return error
    return None


def _typed(error: BaseException) -> EpdError:
    if isinstance(error, EpdError):
        return error
    return RequestCancelledError("the request ended while embeddings were read")
