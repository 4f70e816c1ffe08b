"""The Reserves of one pair stream that are being answered."""

import asyncio
import logging
from collections.abc import Awaitable, Callable

from epd.errors import ResourceExhaustedError
from epd.rpc.request_context import new_id
from epd.rpc.status import status_from_error
from epd.v1 import decode_pb2

logger = logging.getLogger(__name__)


class ReserveAnswers:
    """A task for each, because one that waits for memory must not hold up the others.

    Args:
        answer: Makes the answer to a Reserve; raises nothing but cancellation.
        write: Sends one message on the stream.
        limit: Reserves that may be under way at once; more are refused.
    """

    def __init__(
        self,
        answer: Callable[[decode_pb2.Reserve], Awaitable[decode_pb2.Reserved]],
        write: Callable[[decode_pb2.PairResponse], Awaitable[None]],
        limit: int,
    ) -> None:
        self._answer = answer
        self._write = write
        self._limit = limit
        self._tasks: set[asyncio.Task[None]] = set()

    async def take(self, request: decode_pb2.Reserve) -> None:
        """Has a Reserve answered in the background."""
        if len(self._tasks) >= self._limit:
            full = ResourceExhaustedError(
                f"{self._limit} reservations of this prefill worker are under way",
                reason="QUEUE_FULL",
            )
            status = status_from_error(full, new_id()).SerializeToString()
            refusal = decode_pb2.Reserved(number=request.number, status=status)
            await self._write(decode_pb2.PairResponse(reserved=refusal))
            return
        task = asyncio.create_task(self._run(request))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def close(self) -> None:
        """Gives up what is under way, because the stream is over."""
        for task in self._tasks:
            task.cancel()

    async def _run(self, request: decode_pb2.Reserve) -> None:
        answer = await self._answer(request)
        try:
            await self._write(decode_pb2.PairResponse(reserved=answer))
        except Exception as error:
            # The stream is over, as its reading side finds too; leases end with the pair.
            logger.info("no answer to the Reserve of %s: %r", request.transfer_id, error)
