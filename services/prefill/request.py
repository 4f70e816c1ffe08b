"""What a Prefill call asks for, checked."""

from collections.abc import Sequence
from dataclasses import dataclass

from epd.config import ConfigError
from epd.engine.requests import PromptImage
from epd.errors import InvalidRequestError
from epd.handover.embedding_handle import EmbeddingHandle
from epd.rpc.credentials import split_address
from epd.sampling import SamplingParams
from epd.transfer.base import AgentDescriptor
from epd.v1 import prefill_pb2
from epd.wire.embedding import handle_from_proto
from epd.wire.prompt import (
    check_image_runs,
    checked_digest,
    checked_token_ids,
    checked_transfer_id,
    grid_from_proto,
)
from epd.wire.sampling import sampling_from_proto


@dataclass(frozen=True)
class PrefillJob:
    """A prompt to compute and the decode process its KV goes to.

    ``handles`` pair up with ``images``.
    """

    request_id: str
    transfer_id: str
    token_ids: tuple[int, ...]
    emitted_count: int
    images: tuple[PromptImage, ...]
    handles: tuple[EmbeddingHandle, ...]
    #: Positions of the images that were not encoded when the request was sent.
    pending: frozenset[int]
    position_delta: int
    sampling: SamplingParams
    decode_address: str
    decode_instance_id: str


def job_from_proto(
    request: prefill_pb2.PrefillRequest, agents: Sequence[AgentDescriptor]
) -> PrefillJob:
    """The checked request. ``agents``: this process's transfer endpoints.

    Raises:
        InvalidRequestError: a field has no valid value.
        TransportMismatchError: an encoder cannot be reached over any transport of this process.
    """
    token_ids = checked_token_ids(request.token_ids, request.emitted_count)
    if not request.decode.address:
        raise InvalidRequestError("no decode worker is named", field="decode.address")
    images = tuple(_image(image, index) for index, image in enumerate(request.images))
    check_image_runs(images, len(token_ids))
    return PrefillJob(
        request_id=request.request_id,
        transfer_id=checked_transfer_id(request.transfer_id),
        token_ids=token_ids,
        emitted_count=request.emitted_count,
        images=images,
        handles=tuple(_handle(image, index, agents) for index, image in enumerate(request.images)),
        pending=frozenset(n for n, image in enumerate(request.images) if image.pending),
        position_delta=request.position_delta,
        sampling=sampling_from_proto(request.sampling),
        decode_address=request.decode.address,
        decode_instance_id=request.decode.instance_id,
    )


def _handle(
    message: prefill_pb2.PromptImage, index: int, agents: Sequence[AgentDescriptor]
) -> EmbeddingHandle:
    """The handle, checked as far as can be told without asking its encoder."""
    field = f"images[{index}].handle"
    handle = handle_from_proto(message.handle, agents)
    handle.check(field)
    if handle.digest != message.digest:
        # Its KV would be found, later and by others, under the content of another image.
        raise InvalidRequestError(
            f"the handle's digest is {handle.digest.hex() or 'empty'}, the image's "
            f"{message.digest.hex()}",
            field=f"{field}.digest",
        )
    try:
        split_address(handle.encoder_address)
    except ConfigError as error:
        raise InvalidRequestError(str(error), field=f"{field}.encoder_address") from error
    return handle


def _image(message: prefill_pb2.PromptImage, index: int) -> PromptImage:
    return PromptImage(
        offset=message.offset,
        length=message.length,
        digest=checked_digest(message.digest, f"images[{index}].digest"),
        grid=grid_from_proto(message.grid),
    )
