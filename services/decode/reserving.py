"""Answers to the Reserves of paired prefill processes."""

from epd.errors import EpdError
from epd.handover.receiver import KvReceiver
from epd.rpc.request_context import begin_call, request_id
from epd.rpc.server_calls import ServerCalls
from epd.rpc.server_interceptors import typed_error
from epd.rpc.status import status_from_error
from epd.v1 import decode_pb2
from epd.wire.prompt import checked_transfer_id
from epd.wire.reservation import RESERVE_METHOD, reservation_to_proto


class Reserving:
    """Gives Reserves what a call of their own would have: a span, a duration and typed errors.

    Args:
        receiver: Reserves.
        calls: Where spans and durations go.
    """

    def __init__(self, receiver: KvReceiver, calls: ServerCalls) -> None:
        self._receiver = receiver
        self._calls = calls

    async def answer(self, instance_id: str, request: decode_pb2.Reserve) -> decode_pb2.Reserved:
        """The answer to one Reserve of a paired process. Run it in a task of its own."""
        begin_call(request)
        try:
            with self._calls.message(RESERVE_METHOD, request.trace_context):
                return await self._reserve(instance_id, request)
        except EpdError as error:
            status = status_from_error(error, request_id())
            return decode_pb2.Reserved(number=request.number, status=status.SerializeToString())

    async def _reserve(self, instance_id: str, request: decode_pb2.Reserve) -> decode_pb2.Reserved:
        try:
            reservation = await self._receiver.reserve(
                checked_transfer_id(request.transfer_id),
                instance_id,
                request.token_count,
                request.block_hashes,
            )
        except Exception as raised:
            raise typed_error(raised, RESERVE_METHOD) from raised
        return decode_pb2.Reserved(
            number=request.number, reservation=reservation_to_proto(reservation)
        )
