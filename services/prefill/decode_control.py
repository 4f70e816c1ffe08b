"""Control calls to one decode worker over gRPC."""

from collections.abc import Awaitable, Sequence
from typing import TypeVar

import grpc

from epd.errors import EpdError, UnavailableError
from epd.handover.control import Reservation
from epd.rpc.status import error_from_rpc
from epd.v1 import decode_pb2, decode_pb2_grpc
from services.prefill.reserve_calls import ReserveCalls

T = TypeVar("T")


class GrpcDecodeControl:
    """:class:`epd.handover.control.DecodeControl` over the worker's DecodeService.

    Args:
        stub: The worker's service.
        reserves: Asks for memory on the stream of the pair.
        timeout_s: Bound of the other calls, which never wait.
    """

    def __init__(
        self, stub: decode_pb2_grpc.DecodeServiceStub, reserves: ReserveCalls, timeout_s: float
    ) -> None:
        self._stub = stub
        self._reserves = reserves
        self._timeout_s = timeout_s

    async def reserve(
        self, transfer_id: str, token_count: int, block_hashes: Sequence[bytes]
    ) -> Reservation:
        """Asks for blocks on the pair's stream; may wait in the worker's bounded queue.

        Raises:
            EpdError: as the worker answered, or why there was no answer.
        """
        return await self._reserves.ask(transfer_id, token_count, block_hashes)

    async def announce(
        self, transfer_id: str, generation: int, first_token: int, writes_per_layer: int
    ) -> None:
        """Says which token was drawn, ahead of the seal."""
        request = decode_pb2.AnnounceRequest(
            transfer_id=transfer_id,
            generation=generation,
            first_token=first_token,
            writes_per_layer=writes_per_layer,
        )
        await _typed(self._stub.Announce(request, timeout=self._timeout_s))

    async def renew(self, transfer_ids: Sequence[str]) -> Sequence[str]:
        """Says that transfers make progress; returns those the worker has given up."""
        request = decode_pb2.RenewRequest(transfer_ids=transfer_ids)
        answer = await _typed(self._stub.Renew(request, timeout=self._timeout_s))
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
        await _typed(self._stub.Fail(request, timeout=self._timeout_s))

    async def settle(self, transfer_ids: Sequence[str]) -> None:
        """Confirms that no WRITE of the transfers runs or will be posted."""
        request = decode_pb2.SettleRequest(transfer_ids=transfer_ids)
        await _typed(self._stub.Settle(request, timeout=self._timeout_s))


async def _typed(call: Awaitable[T]) -> T:
    try:
        return await call
    except grpc.aio.AioRpcError as error:
        raise error_from_rpc(error) from error
    except grpc.aio.UsageError as error:  # the channel of a worker that has left the set
        raise UnavailableError("the decode worker has left the fleet") from error
