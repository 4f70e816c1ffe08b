"""What a Decode call asks for, checked."""

from dataclasses import dataclass

from epd.engine.requests import PromptImage, SamplingParams
from epd.errors import InvalidRequestError
from epd.media import Media
from epd.v1 import decode_pb2
from epd.wire.media import media_from_proto
from epd.wire.prompt import (
    check_image_runs,
    checked_digest,
    checked_token_ids,
    checked_transfer_id,
)
from epd.wire.sampling import sampling_from_proto


@dataclass(frozen=True)
class LocalImage:
    """An image file or video whose anchor token stands at ``anchor_index`` of the prompt."""

    anchor_index: int
    digest: bytes
    data: Media


@dataclass(frozen=True)
class DecodeJob:
    """A request whose KV arrives (``transfer_id``) or is computed here (``local_images``).

    Exactly one of the two is set. ``images`` describes an arriving prompt's placeholder runs.
    """

    request_id: str
    token_ids: tuple[int, ...]
    emitted_count: int
    sampling: SamplingParams
    position_delta: int
    images: tuple[PromptImage, ...]
    transfer_id: str | None
    local_images: tuple[LocalImage, ...] | None

    @property
    def prompt_tokens(self) -> int:
        """Tokens of the client's prompt, without replayed ones."""
        return len(self.token_ids) - self.emitted_count

    @property
    def emitted(self) -> tuple[int, ...]:
        """The replayed tokens."""
        return self.token_ids[self.prompt_tokens :]


def job_from_proto(request: decode_pb2.DecodeRequest) -> DecodeJob:
    """The checked request.

    Raises:
        InvalidRequestError: a field has no valid value.
    """
    source = request.WhichOneof("source")
    if source is None:
        raise InvalidRequestError("neither transfer_id nor local is set", field="source")
    token_ids = checked_token_ids(request.token_ids, request.emitted_count)
    images = tuple(
        PromptImage(
            offset=image.offset,
            length=image.length,
            digest=checked_digest(image.digest, f"images[{index}].digest"),
        )
        for index, image in enumerate(request.images)
    )
    check_image_runs(images, len(token_ids))
    is_local = source == "local"
    return DecodeJob(
        request_id=request.request_id,
        token_ids=token_ids,
        emitted_count=request.emitted_count,
        sampling=sampling_from_proto(request.sampling),
        position_delta=request.position_delta,
        images=images,
        transfer_id=None if is_local else checked_transfer_id(request.transfer_id),
        local_images=_local_images(request.local, len(token_ids)) if is_local else None,
    )


def _local_images(local: decode_pb2.LocalPrefill, token_count: int) -> tuple[LocalImage, ...]:
    images: list[LocalImage] = []
    for index, image in enumerate(local.images):
        field = f"local.images[{index}]"
        after = images[-1].anchor_index if images else -1
        if not after < image.anchor_index < token_count:
            raise InvalidRequestError(
                f"anchor {image.anchor_index} is not between {after} and {token_count}",
                field=f"{field}.anchor_index",
            )
        images.append(
            LocalImage(
                image.anchor_index,
                checked_digest(image.digest, f"{field}.digest"),
                media_from_proto(image),
            )
        )
    return tuple(images)
