"""DecodeService: wire messages to the parts that do the work."""

from collections.abc import AsyncIterator

import grpc

from epd.errors import EpdError, UnsupportedFeatureError
from epd.handover.receiver import KvReceiver
from epd.rpc.aliases import ServicerContext
from epd.rpc.status import error_from_code
from epd.v1 import decode_pb2, decode_pb2_grpc
from epd.wire.prompt import checked_transfer_id
from services.decode.local import LocalDecoding
from services.decode.pairing import Pairings
from services.decode.remote import RemoteDecoding
from services.decode.request import job_from_proto


class DecodeServicer(decode_pb2_grpc.DecodeServiceServicer):
    """See the proto for what each call means."""

    def __init__(
        self,
        pairings: Pairings,
        receiver: KvReceiver,
        remote: RemoteDecoding,
        local: LocalDecoding | None,
    ) -> None:
        """``local`` is None on a worker that is not unified."""
        self._pairings = pairings
        self._receiver = receiver
        self._remote = remote
        self._local = local

    async def Pair(
        self, requests: AsyncIterator[decode_pb2.PairRequest], context: ServicerContext
    ) -> None:
        """Answers by ``context.write``, because it reads and writes at the same time."""
        await self._pairings.serve(context)

    async def Announce(
        self, request: decode_pb2.AnnounceRequest, context: ServicerContext
    ) -> decode_pb2.AnnounceResponse:
        self._receiver.announce(
            checked_transfer_id(request.transfer_id),
            request.generation,
            request.first_token,
            request.writes_per_layer,
        )
        return decode_pb2.AnnounceResponse()

    async def Renew(
        self, request: decode_pb2.RenewRequest, context: ServicerContext
    ) -> decode_pb2.RenewResponse:
        unknown = self._receiver.renew(request.transfer_ids)
        return decode_pb2.RenewResponse(unknown_transfer_ids=unknown)

    async def Fail(
        self, request: decode_pb2.FailRequest, context: ServicerContext
    ) -> decode_pb2.FailResponse:
        transfer_id = checked_transfer_id(request.transfer_id)
        self._receiver.fail(transfer_id, _reported_error(request), request.settled)
        return decode_pb2.FailResponse()

    async def Settle(
        self, request: decode_pb2.SettleRequest, context: ServicerContext
    ) -> decode_pb2.SettleResponse:
        self._receiver.settle(request.transfer_ids)
        return decode_pb2.SettleResponse()

    async def Decode(self, request: decode_pb2.DecodeRequest, context: ServicerContext) -> None:
        """Answers by ``context.write``, which waits for a slow reader."""
        job = job_from_proto(request)
        if job.transfer_id is not None:
            await self._remote.run(job, job.transfer_id, context.write)
        elif self._local is not None and job.local_images is not None:
            await self._local.run(job, job.local_images, context.write)
        else:
            raise UnsupportedFeatureError(
                "this decode worker serves no request alone; --unified makes it do so",
                reason="NOT_UNIFIED",
            )


def _reported_error(request: decode_pb2.FailRequest) -> EpdError:
    """Prefill's reason as the error its Decode stream ends with."""
    names = {member.value[0]: member.name for member in grpc.StatusCode}
    code = names.get(request.status_code, "INTERNAL")
    return error_from_code(code, request.message, request.reason or None)
