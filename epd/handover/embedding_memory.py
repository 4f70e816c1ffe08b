"""Bounded memory of a prefill worker into which embeddings are READ."""

import asyncio
from collections import deque
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from epd.errors import InvalidRequestError, ResourceExhaustedError
from epd.transfer.arena import Arena, ByteRange
from epd.transfer.base import Segment
from epd.transfer.buffer import HostBuffer


class EmbeddingMemory:
    """Grants all ranges of a request or none; a waiter holds nothing. Owned by the event loop.

    Args:
        capacity_bytes: Size of the buffer, which the owner registers.
        max_waiting: Most requests that wait for room.
        wait_timeout_s: Longest wait.
    """

    def __init__(self, capacity_bytes: int, max_waiting: int, wait_timeout_s: float) -> None:
        self._buffer = HostBuffer(capacity_bytes)
        self._arena = Arena(capacity_bytes)
        self._max_waiting = max_waiting
        self._wait_timeout_s = wait_timeout_s
        self._waiting: deque[tuple[Sequence[int], asyncio.Future[list[ByteRange]]]] = deque()

    @property
    def segment(self) -> Segment:
        """The whole memory, for registration."""
        return self._buffer.segment

    @property
    def used_bytes(self) -> int:
        """Bytes that hold embeddings of requests."""
        return self._arena.used_bytes

    @property
    def quarantined_bytes(self) -> int:
        """Bytes into which a failed READ may still come."""
        return self._arena.quarantined_bytes

    @property
    def waiting(self) -> int:
        """Requests that wait for room."""
        return len(self._waiting)

    async def hold(self, lengths: Sequence[int]) -> list[ByteRange]:
        """One range per length, first come, first served.

        Raises:
            InvalidRequestError: never room for so much.
            ResourceExhaustedError: too many wait, or the wait is too long.
        """
        needed = sum(-(-length // self._arena.alignment) for length in lengths)
        if needed * self._arena.alignment > self._arena.capacity_bytes:
            raise InvalidRequestError(
                f"the images' embeddings have {sum(lengths)} bytes, there is room for "
                f"{self._arena.capacity_bytes} in all",
                field="images",
                reason="EMBEDDINGS_TOO_LARGE",
            )
        if not self._waiting and (granted := self._arena.allocate_all(lengths)) is not None:
            return granted
        if len(self._waiting) >= self._max_waiting:
            raise ResourceExhaustedError(
                f"{len(self._waiting)} requests wait for embedding memory, "
                f"the limit is {self._max_waiting}",
                reason="QUEUE_FULL",
            )
        turn: asyncio.Future[list[ByteRange]] = asyncio.get_running_loop().create_future()
        entry = (lengths, turn)
        self._waiting.append(entry)
        try:
            async with asyncio.timeout(self._wait_timeout_s):
                return await turn
        except BaseException as error:
            if turn.done() and not turn.cancelled():  # granted while this caller was giving up
                self.free(turn.result())
            elif entry in self._waiting:
                self._waiting.remove(entry)
                self._serve()  # the next one may be smaller
            if isinstance(error, TimeoutError):
                raise ResourceExhaustedError(
                    f"no embedding memory became free in {self._wait_timeout_s} s",
                    reason="NO_EMBEDDING_MEMORY",
                ) from None
            raise

    def free(self, ranges: Sequence[ByteRange]) -> None:
        """Gives ranges back."""
        for one in ranges:
            self._arena.free(one)
        self._serve()

    def quarantine(self, ranges: Sequence[ByteRange]) -> None:
        """Nobody's any more, but a READ may still come in."""
        for one in ranges:
            self._arena.quarantine(one)

    def settle(self, ranges: Sequence[ByteRange]) -> None:
        """Ends a quarantine."""
        for one in ranges:
            self._arena.settle(one)
        self._serve()

    def part(self, one: ByteRange) -> Segment:
        """Where a range lies."""
        return self._buffer.part(one.offset, one.length)

    def view(self, one: ByteRange) -> npt.NDArray[np.uint8]:
        """A range's bytes, without a copy."""
        return self._buffer.view(one.offset, one.length)

    def check_integrity(self) -> None:
        """Asserts that every byte is accounted for."""
        self._arena.check_integrity()

    def _serve(self) -> None:
        while self._waiting:
            lengths, turn = self._waiting[0]
            if turn.done():  # its caller was cancelled and has not run yet
                self._waiting.popleft()
                continue
            granted = self._arena.allocate_all(lengths)
            if granted is None:
                return
            self._waiting.popleft()
            turn.set_result(granted)
