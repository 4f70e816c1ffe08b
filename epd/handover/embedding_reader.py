"""The prefill side of the embedding hand-over: READs from encoders' memory."""

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Collection, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from epd.cleanup import CleanupTasks
from epd.errors import (
    EpdError,
    InvalidRequestError,
    NotPostedError,
    RequestCancelledError,
    TransferFailedError,
    UnknownMemoryError,
)
from epd.handover.control import EncoderControl
from epd.handover.embedding_handle import EmbeddingHandle
from epd.handover.embedding_memory import EmbeddingMemory
from epd.handover.encoder_leases import EncoderLeases
from epd.handover.peers import PeerTable
from epd.handover.read_batch import ReadBatch
from epd.transfer.agent import TransferAgent
from epd.transfer.arena import ByteRange
from epd.transfer.base import Segment, TransferResult


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


#: An image's position in the request, its handle and the memory it goes to.
_Place = tuple[int, EmbeddingHandle, ByteRange]


class _OutOfRangeError(TransferFailedError):
    """A handle names memory that its encoder does not offer."""

    def __init__(self, message: str, index: int) -> None:
        super().__init__(message)
        self.index = index


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
        self._cleanup = CleanupTasks()

    @asynccontextmanager
    async def read(
        self,
        handles: Sequence[EmbeddingHandle],
        late: Collection[int] = (),
        arrived: Callable[[int, ReadReport], None] = lambda index, report: None,
    ) -> AsyncIterator[tuple[tuple[ReadEmbedding, ...], ReadReport]]:
        """Yields one embedding per handle, in order; on exit their memory is given back, so leave
        only when the engine no longer uses it. The encoders' leases are renewed while this waits
        and reads, and released on every path, with the truth about running READs.

        Args:
            handles: The images' handles, in order.
            late: Positions of images that are not encoded yet. Their embeddings come while the
                caller goes on; what stops them cancels the caller's body and is raised.
            arrived: Called with the position of each of those when its embedding is in place.

        Raises:
            InvalidRequestError: a handle contradicts itself or names memory that is none of the
                encoder's; or there is never so much room.
            ResourceExhaustedError: no room in time.
            NotFoundError: an encoder does not know a handle (any more).
            TransferFailedError: a READ failed; the text names hop and image.
        """
        for index, handle in enumerate(handles):
            handle.check(f"images[{index}].handle")
        leases = EncoderLeases(handles, self._control, self._control_timeout_s)
        batches = [ReadBatch(self._agent)]
        ranges: list[ByteRange] = []
        started = time.monotonic_ns()
        try:
            async with asyncio.TaskGroup() as group:
                renewing = group.create_task(leases.renew_on())
                if handles:
                    ranges = await self._memory.hold([handle.byte_count for handle in handles])
                held = time.monotonic_ns()
                places = list(enumerate(zip(handles, ranges, strict=True)))
                early = [(n, *place) for n, place in places if n not in late]
                results = await self._read_held(early, batches[0], leases)
                report = _report(results, started, held)
                if late:

                    async def read_late(n: int, handle: EmbeddingHandle, held: ByteRange) -> None:
                        await self._control(handle.encoder_address).await_ready(handle.handle_id)
                        ready = time.monotonic_ns()
                        batches.append(batch := ReadBatch(self._agent))
                        moved = await self._read_held([(n, handle, held)], batch, leases)
                        arrived(n, _report(moved, ready, ready))

                    waiting = [
                        group.create_task(read_late(n, *place)) for n, place in places if n in late
                    ]
                    yield tuple(map(self._embedding, handles, ranges)), report
                    for one in waiting:  # not needed any more: the KV was in the prefix cache
                        one.cancel()
                renewing.cancel()
        except BaseException as error:
            # A group's first error is the cause, the others follow from its cancellations.
            cause = error.exceptions[0] if isinstance(error, BaseExceptionGroup) else error
            self._give_up(leases, batches, ranges, _typed(cause))
            raise cause from cause.__cause__
        if late:
            self._give_up(leases, batches, ranges, RequestCancelledError("no longer needed"))
            return
        self._cleanup.spawn(leases.release(settled=True))
        try:
            yield tuple(map(self._embedding, handles, ranges)), report
        finally:
            self._memory.free(ranges)

    async def close(self, timeout_s: float) -> None:
        """Waits until encoders have been told what is given back, at the process's end."""
        await self._cleanup.drain(timeout_s)

    async def _read_held(
        self, images: Sequence[_Place], reads: ReadBatch, leases: EncoderLeases
    ) -> list[TransferResult]:
        """Reads under leases that are known to have held all the time."""
        try:
            results = await self._read_all(images, reads)
        except TransferFailedError as error:
            await leases.confirm()  # an unknown handle explains it better
            if isinstance(error, _OutOfRangeError):
                field = f"images[{error.index}].handle.segments"
                raise InvalidRequestError(error.message, field=field) from error
            raise
        await leases.confirm()
        return results

    async def _read_all(self, images: Sequence[_Place], reads: ReadBatch) -> list[TransferResult]:
        async with AsyncExitStack() as connections:
            for index, handle, held in images:
                hop = f"embedding READ from encoder {handle.encoder_address}, image {index}"
                try:
                    peer = await connections.enter_async_context(
                        self._peers.use(handle.encoder_address, handle.agent)
                    )
                except TransferFailedError as error:
                    raise TransferFailedError(f"{hop}: {error.message}") from error
                local = _split(self._memory.part(held), handle.segments)
                reads.post(peer, local, handle.segments)
            failed = await reads.first_failure()
            if failed is not None:
                position, cause = failed
                index, handle, _ = images[position]
                address = handle.encoder_address
                text = f"embedding READ from encoder {address}, image {index}: {cause.message}"
                if isinstance(cause, UnknownMemoryError):
                    raise _OutOfRangeError(text, index) from cause
                if not isinstance(cause, NotPostedError):
                    self._peers.suspect(address)
                raise TransferFailedError(text) from cause
            return reads.results()

    def _give_up(
        self,
        leases: EncoderLeases,
        batches: Sequence[ReadBatch],
        ranges: Sequence[ByteRange],
        reason: EpdError,
    ) -> None:
        for reads in batches:
            reads.close(reason)
        if all(reads.settled for reads in batches):
            self._memory.free(ranges)
            self._cleanup.spawn(leases.release(settled=True))
        else:
            self._memory.quarantine(ranges)
            self._cleanup.spawn(self._settle(leases, batches, ranges))

    async def _settle(
        self, leases: EncoderLeases, batches: Sequence[ReadBatch], ranges: Sequence[ByteRange]
    ) -> None:
        """Tells the encoders at once that READs still run, and again when none does."""
        await leases.release(settled=False)
        for reads in batches:
            await reads.drained()
        self._memory.settle(ranges)
        await leases.release(settled=True)

    def _embedding(self, handle: EmbeddingHandle, held: ByteRange) -> ReadEmbedding:
        return ReadEmbedding(
            self._memory.part(held).address, self._memory.view(held), handle.shape, handle.dtype
        )


def _report(results: Sequence[TransferResult], began_ns: int, held_ns: int) -> ReadReport:
    return ReadReport(
        sum(result.byte_count for result in results),
        sum(result.descriptor_count for result in results),
        held_ns - began_ns,
        time.monotonic_ns() - held_ns,
    )


def _split(whole: Segment, like: Sequence[Segment]) -> list[Segment]:
    """Cuts ``whole`` into neighbouring parts as long as those of ``like``."""
    parts, address = [], whole.address
    for one in like:
        parts.append(Segment(address, one.length, whole.device_id))
        address += one.length
    return parts


def _typed(error: BaseException) -> EpdError:
    if isinstance(error, EpdError):
        return error
    return RequestCancelledError("the request ended while embeddings were read")
