"""Control calls to one encoder over gRPC."""

from collections.abc import Sequence

import grpc

from epd.rpc.status import error_from_rpc
from epd.v1 import encoder_pb2, encoder_pb2_grpc


class GrpcEncoderControl:
    """:class:`epd.handover.control.EncoderControl` over an encoder's EncoderService.

    Args:
        stub: The encoder's service.
        timeout_s: Bound of each call that does not wait there.
        encode_timeout_s: Longest wait for an embedding.
    """

    def __init__(
        self,
        stub: encoder_pb2_grpc.EncoderServiceStub,
        timeout_s: float,
        encode_timeout_s: float,
    ) -> None:
        self._stub = stub
        self._timeout_s = timeout_s
        self._encode_timeout_s = encode_timeout_s

    async def await_ready(self, handle_id: str) -> None:
        """Returns once the embedding is in place; the encoder bounds that wait too."""
        request = encoder_pb2.AwaitReadyRequest(handle_id=handle_id)
        try:
            await self._stub.AwaitReady(request, timeout=self._encode_timeout_s)
        except grpc.aio.AioRpcError as error:
            raise error_from_rpc(error) from error

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
