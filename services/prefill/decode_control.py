"""Control calls to one decode worker over gRPC."""

from collections.abc import Awaitable, Sequence
from typing import TypeVar

import grpc

from epd.errors import EpdError
from epd.handover.control import Reservation
from epd.rpc.status import error_from_rpc
from epd.v1 import decode_pb2, decode_pb2_grpc
from epd.wire.transfer import segment_from_proto

T = TypeVar("T")


class GrpcDecodeControl:
    """:class:`epd.handover.control.DecodeControl` over the worker's DecodeService.

    Args:
        stub: The worker's service.
        sender_instance_id: This process, as the worker knows it from pairing.
        reserve_timeout_s: Bound of a Reserve, which may wait for memory there.
        control_timeout_s: Bound of the other calls, which never wait.
    """

    def __init__(
        self,
        stub: decode_pb2_grpc.DecodeServiceStub,
        sender_instance_id: str,
        *,
        reserve_timeout_s: float,
        control_timeout_s: float,
    ) -> None:
        self._stub = stub
        self._sender_instance_id = sender_instance_id
        self._reserve_timeout_s = reserve_timeout_s
        self._control_timeout_s = control_timeout_s

    async def reserve(
        self, transfer_id: str, token_count: int, block_hashes: Sequence[bytes]
    ) -> Reservation:
        """Asks for blocks; may wait in the worker's bounded queue.

        Raises:
            EpdError: as the worker answered.
        """
        request = decode_pb2.ReserveRequest(
            transfer_id=transfer_id,
            sender_instance_id=self._sender_instance_id,
            token_count=token_count,
            block_hashes=block_hashes,
        )
        answer = await _typed(self._stub.Reserve(request, timeout=self._reserve_timeout_s))
        return Reservation(
            transfer_id=transfer_id,
            generation=answer.generation,
            block_ids=tuple(answer.block_ids),
            seal=segment_from_proto(answer.seal),
            cached_block_count=answer.cached_block_count,
            progress_timeout_s=answer.progress_timeout_ms / 1000,
            checksum=answer.checksum,
        )

    async def renew(self, transfer_ids: Sequence[str]) -> Sequence[str]:
        """Says that transfers make progress; returns those the worker has given up."""
        request = decode_pb2.RenewRequest(transfer_ids=transfer_ids)
        answer = await _typed(self._stub.Renew(request, timeout=self._control_timeout_s))
        return list(answer.unknown_transfer_ids)

    async def fail(self, transfer_id: str, error: EpdError, settled: bool) -> None:
        """Says why a transfer failed."""
        request = decode_pb2.FailRequest(
            transfer_id=transfer_id,
            reason=error.reason,
            message=error.message,
            status_code=grpc.StatusCode[error.code].value[0],
            settled=settled,
        )
        await _typed(self._stub.Fail(request, timeout=self._control_timeout_s))

    async def settle(self, transfer_ids: Sequence[str]) -> None:
        """Confirms that no WRITE of the transfers runs or will be posted."""
        request = decode_pb2.SettleRequest(transfer_ids=transfer_ids)
        await _typed(self._stub.Settle(request, timeout=self._control_timeout_s))


async def _typed(call: Awaitable[T]) -> T:
    try:
        return await call
    except grpc.aio.AioRpcError as error:
        raise error_from_rpc(error) from error
