"""The prefill side of the embedding hand-over: READs from encoders' memory."""

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from epd.cleanup import CleanupTasks
from epd.errors import EpdError, RequestCancelledError, TransferFailedError
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
        reads = ReadBatch(self._agent)
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
            reads.close(_typed(cause))
            self._give_up(leases, reads, ranges)
            raise cause from cause.__cause__
        self._cleanup.spawn(leases.release(settled=True))
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

    async def close(self, timeout_s: float) -> None:
        """Waits until encoders have been told what is given back, at the process's end."""
        await self._cleanup.drain(timeout_s)

    async def _read_all(
        self, handles: Sequence[EmbeddingHandle], ranges: Sequence[ByteRange], reads: ReadBatch
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
                reads.post(peer, local, handle.segments)
            failed = await reads.first_failure()
            if failed is not None:
                index, cause = failed
                address = handles[index].encoder_address
                self._peers.suspect(address)
                raise TransferFailedError(
                    f"embedding READ from encoder {address}, image {index}: {cause.message}"
                ) from cause
            return reads.results()

    def _give_up(
        self, leases: EncoderLeases, reads: ReadBatch, ranges: Sequence[ByteRange]
    ) -> None:
        if reads.settled:
            self._memory.free(ranges)
            self._cleanup.spawn(leases.release(settled=True))
        else:
            self._memory.quarantine(ranges)
            self._cleanup.spawn(self._settle(leases, reads, ranges))

    async def _settle(
        self, leases: EncoderLeases, reads: ReadBatch, ranges: Sequence[ByteRange]
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
