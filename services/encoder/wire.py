"""Messages of EncoderService to the library's dataclasses and back."""

import time
from collections.abc import Sequence

from epd.encoding.encode_events import (
    EmbeddingHandle,
    ImageInput,
    ImagePlanned,
    ImageReady,
    Stage,
)
from epd.errors import InvalidRequestError
from epd.telemetry import semconv
from epd.transfer.base import AgentDescriptor
from epd.v1 import common_pb2, encoder_pb2
from epd.wire.media import media_from_proto
from epd.wire.timings import timings_to_proto
from epd.wire.transfer import agents_to_proto, segment_to_proto


def images_from_proto(request: encoder_pb2.EncodeRequest) -> list[ImageInput]:
    """The images of a call; the encoder checks what is in them.

    Raises:
        InvalidRequestError: two images have the same index, so answers would be ambiguous.
    """
    indexes = [image.image_index for image in request.images]
    if len(set(indexes)) < len(indexes):
        raise InvalidRequestError(
            f"image indexes must differ, not {indexes}", field="images.image_index"
        )
    return [
        ImageInput(
            image.image_index,
            image.digest,
            media_from_proto(image),
        )
        for image in request.images
    ]


class EncodeResponses:
    """Writes the events of Encode; handles say which process they belong to.

    Args:
        agents: Transfer endpoints with the embedding memory.
        address: gRPC address for Renew and Release.
    """

    def __init__(self, agents: Sequence[AgentDescriptor], address: str) -> None:
        self._agents = agents_to_proto(agents)
        self._address = address

    def ready(self, event: ImageReady, started_ns: int) -> encoder_pb2.EncodeResponse:
        """An image's embedding is in place; the call's handler started at ``started_ns``."""
        now_ns = time.monotonic_ns()
        # What else the call had to write came first.
        deliver = Stage(semconv.STAGE_DELIVER, event.stages[-1].end_ns, now_ns)
        timings = _durations([*event.stages, deliver])
        return encoder_pb2.EncodeResponse(
            ready=encoder_pb2.Ready(
                image_index=event.image_index,
                timings=timings_to_proto(timings),
                service_ns=now_ns - started_ns,
            )
        )

    def planned(self, event: ImagePlanned) -> encoder_pb2.EncodeResponse:
        """An image has been read so far that its place in the prompt is known."""
        return encoder_pb2.EncodeResponse(planned=self._planned(event))

    def _planned(self, event: ImagePlanned) -> encoder_pb2.Planned:
        plan = event.handle.spec.plan
        temporal, height, width = plan.grid
        return encoder_pb2.Planned(
            image_index=event.image_index,
            grid=common_pb2.ImageGrid(temporal=temporal, height=height, width=width),
            anchor_token_id=plan.anchor_token_id,
            placeholder_ids=plan.placeholder_ids,
            position_delta=plan.position_delta,
            handle=self._handle(event.handle),
            cache_hit=event.cache_hit,
        )

    def _handle(self, handle: EmbeddingHandle) -> common_pb2.EmbeddingHandle:
        return common_pb2.EmbeddingHandle(
            handle_id=handle.handle_id,
            agents=self._agents,
            digest=handle.digest,
            segments=[segment_to_proto(handle.segment)],
            byte_count=handle.spec.byte_count,
            shape=handle.spec.shape,
            dtype=handle.spec.dtype,
            lease_ms=int(handle.lease_s * 1000),
            encoder_address=self._address,
        )


def _durations(stages: Sequence[Stage]) -> dict[str, int]:
    """Nanoseconds by stage name; an image waits twice, which adds up."""
    durations: dict[str, int] = {}
    for stage in stages:
        durations[stage.name] = durations.get(stage.name, 0) + stage.end_ns - stage.start_ns
    return durations
