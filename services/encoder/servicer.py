"""EncoderService over an Encoder."""

import time
from collections.abc import AsyncIterator
from contextlib import aclosing

from opentelemetry import trace
from opentelemetry.trace import Tracer

from epd.encoding.encode_events import ImageReady
from epd.encoding.encoder import Encoder
from epd.rpc.aliases import ServicerContext
from epd.telemetry import semconv
from epd.telemetry.spans import record_stage
from epd.v1 import encoder_pb2, encoder_pb2_grpc
from services.encoder.wire import EncodeResponses, images_from_proto


class EncoderServicer(encoder_pb2_grpc.EncoderServiceServicer):
    """Thin: conversions and spans; the encoder decides."""

    def __init__(self, encoder: Encoder, responses: EncodeResponses, tracer: Tracer) -> None:
        self._encoder = encoder
        self._responses = responses
        self._tracer = tracer

    async def Encode(
        self, request: encoder_pb2.EncodeRequest, context: ServicerContext
    ) -> AsyncIterator[encoder_pb2.EncodeResponse]:
        """See the proto."""
        started_ns = time.monotonic_ns()
        images = images_from_proto(request)
        trace.get_current_span().set_attribute(semconv.EPD_IMAGE_COUNT, len(images))
        async with aclosing(self._encoder.encode(images, request.attempt_id)) as events:
            async for event in events:
                if isinstance(event, ImageReady):
                    self._record(event)
                    yield self._responses.ready(event, started_ns)
                else:
                    yield self._responses.planned(event)

    async def AwaitReady(
        self, request: encoder_pb2.AwaitReadyRequest, context: ServicerContext
    ) -> encoder_pb2.AwaitReadyResponse:
        """See the proto."""
        await self._encoder.await_ready(request.handle_id)
        return encoder_pb2.AwaitReadyResponse()

    async def Renew(
        self, request: encoder_pb2.EncoderServiceRenewRequest, context: ServicerContext
    ) -> encoder_pb2.EncoderServiceRenewResponse:
        """See the proto."""
        unknown = self._encoder.renew(request.handle_ids, reading=request.reading)
        return encoder_pb2.EncoderServiceRenewResponse(unknown_handle_ids=unknown)

    async def Release(
        self, request: encoder_pb2.ReleaseRequest, context: ServicerContext
    ) -> encoder_pb2.ReleaseResponse:
        """See the proto."""
        unknown = self._encoder.release(
            request.handle_ids, settled=request.settled, attempt_id=request.attempt_id
        )
        return encoder_pb2.ReleaseResponse(unknown_handle_ids=unknown)

    def _record(self, event: ImageReady) -> None:
        if not trace.get_current_span().get_span_context().is_valid:
            return  # the caller does not trace; a span here would be a root of its own
        for stage in event.stages:
            if stage.name in semconv.IMAGE_SPANS:
                record_stage(self._tracer, stage.name, start_ns=stage.start_ns, end_ns=stage.end_ns)
