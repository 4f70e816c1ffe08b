"""Control calls to one encoder over gRPC."""

from collections.abc import Sequence

import grpc

from epd.rpc.status import error_from_rpc
from epd.v1 import encoder_pb2, encoder_pb2_grpc


class GrpcEncoderControl:
    """:class:`epd.handover.control.EncoderControl` over an encoder's EncoderService.

    Args:
        stub: The encoder's service.
        timeout_s: Bound of each call; none of them waits there.
    """

    def __init__(self, stub: encoder_pb2_grpc.EncoderServiceStub, timeout_s: float) -> None:
        self._stub = stub
        self._timeout_s = timeout_s

    async def renew(self, handle_ids: Sequence[str]) -> Sequence[str]:
        """Starts leases anew; returns the handles the encoder does not know."""
        request = encoder_pb2.EncoderServiceRenewRequest(handle_ids=handle_ids, reading=True)
        try:
            answer = await self._stub.Renew(request, timeout=self._timeout_s)
        except grpc.aio.AioRpcError as error:
            raise error_from_rpc(error) from error
        return list(answer.unknown_handle_ids)

    async def release(self, handle_ids: Sequence[str], settled: bool) -> None:
        """Gives leases back; ``settled``: no READ of them runs or will be posted."""
        request = encoder_pb2.ReleaseRequest(handle_ids=handle_ids, settled=settled)
        try:
            await self._stub.Release(request, timeout=self._timeout_s)
        except grpc.aio.AioRpcError as error:
            raise error_from_rpc(error) from error
