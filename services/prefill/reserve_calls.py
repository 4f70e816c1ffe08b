"""Reserves on a pair's stream that wait for their answer."""

import asyncio
import itertools
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext

from google.protobuf.message import DecodeError
from google.rpc import code_pb2, status_pb2

from epd.errors import (
    DeadlineExceededError,
    EpdError,
    ResourceExhaustedError,
    UnavailableError,
)
from epd.handover.control import Reservation
from epd.rpc.status import error_from_status
from epd.v1 import decode_pb2
from epd.wire.reservation import reservation_from_proto

#: Around the wait for an answer; gives the headers of the trace context.
Traced = Callable[[], AbstractContextManager[Mapping[str, str]]]


def untraced() -> AbstractContextManager[Mapping[str, str]]:
    """No trace."""
    return nullcontext({})


class ReserveCalls:
    """Asks on a stream that is there already. One object per stream, on its event loop.

    Args:
        timeout_s: Longest wait for an answer; the worker may make a Reserve wait for memory.
        traced: Goes around every wait.
        max_unsent: Reserves that may wait for the stream to take them; more are refused.
    """

    def __init__(self, timeout_s: float, traced: Traced = untraced, max_unsent: int = 1024) -> None:
        #: What the stream's writer shall send. No request writes itself: gRPC ends the stream when
        #: one is cancelled that is just writing.
        self.outgoing: asyncio.Queue[decode_pb2.Reserve] = asyncio.Queue(max_unsent)
        self._timeout_s = timeout_s
        self._traced = traced
        self._numbers = itertools.count(1)
        self._waiting: dict[int, asyncio.Future[decode_pb2.Reserved]] = {}
        self._over: EpdError | None = None

    async def ask(
        self, transfer_id: str, token_count: int, block_hashes: Sequence[bytes]
    ) -> Reservation:
        """Asks for blocks. Who gives up says Fail, else the worker may reserve them all the same.

        Raises:
            EpdError: as the worker answered, or why the stream is over.
            UnavailableError: likewise, or its answer is neither a reservation nor an error.
            DeadlineExceededError: no answer in time.
            ResourceExhaustedError: the stream takes no more.
        """
        number = next(self._numbers)
        with self._traced() as headers:
            if self._over is not None:
                raise self._over.with_traceback(None)
            request = decode_pb2.Reserve(
                number=number,
                transfer_id=transfer_id,
                token_count=token_count,
                block_hashes=block_hashes,
                trace_context=headers,
            )
            try:
                self.outgoing.put_nowait(request)
            except asyncio.QueueFull:
                raise ResourceExhaustedError(
                    f"{self.outgoing.qsize()} reservations wait to be sent to one decode worker",
                    reason="QUEUE_FULL",
                ) from None
            answered = self._waiting[number] = asyncio.get_running_loop().create_future()
            try:
                async with asyncio.timeout(self._timeout_s):
                    answer = await answered
            except TimeoutError:
                raise DeadlineExceededError(
                    f"decode did not answer Reserve in {self._timeout_s} s"
                ) from None
            finally:
                del self._waiting[number]
            if answer.HasField("reservation"):
                return reservation_from_proto(transfer_id, answer.reservation)
            raise _refusal(answer.status)

    def answered(self, answer: decode_pb2.Reserved) -> None:
        """An answer has come; whoever asked may have given up."""
        waiting = self._waiting.get(answer.number)
        if waiting is not None and not waiting.done():
            waiting.set_result(answer)

    def close(self, reason: EpdError) -> None:
        """The stream is over: nothing is answered any more."""
        self._over = self._over or reason
        for waiting in self._waiting.values():
            if not waiting.done():
                waiting.set_exception(self._over.with_traceback(None))


def _refusal(serialized: bytes) -> EpdError:
    """The error in an answer. What is none is that worker's fault, so another one may be tried."""
    try:
        status = status_pb2.Status.FromString(serialized)
        if status.code == code_pb2.OK:
            raise ValueError("it is neither a reservation nor an error")
        return error_from_status(status)
    except (DecodeError, ValueError) as error:
        return UnavailableError(
            f"decode's answer to Reserve is malformed: {error}", reason="MALFORMED_ANSWER"
        )
