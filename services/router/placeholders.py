"""Replaces each image's anchor token by the placeholder tokens the image expands to."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from epd.errors import InvalidRequestError
from epd.v1 import common_pb2


@dataclass(frozen=True)
class ImagePlan:
    """What the encoder says about an image before it is encoded.

    ``handle`` is passed on unread: it is between encoder and prefill worker.
    """

    index: int
    grid: common_pb2.ImageGrid
    anchor_token_id: int
    placeholder_ids: tuple[int, ...]
    position_delta: int
    handle: common_pb2.EmbeddingHandle
    cache_hit: bool


@dataclass(frozen=True)
class PlacedImage:
    """An image's run of placeholders in the expanded prompt.

    ``pending``: its embedding was not in place when the prompt was expanded.
    """

    offset: int
    length: int
    plan: ImagePlan
    pending: bool = False


@dataclass(frozen=True)
class ExpandedPrompt:
    """The tokens the language model sees. ``position_delta`` is the sum over the images."""

    token_ids: tuple[int, ...]
    images: tuple[PlacedImage, ...]
    position_delta: int

    @property
    def image_tokens(self) -> int:
        """Placeholder tokens of all images."""
        return sum(image.length for image in self.images)


def expand(
    token_ids: Sequence[int], plans: Sequence[ImagePlan], pending: Collection[int] = ()
) -> ExpandedPrompt:
    """Puts the i-th image in the place of the i-th anchor token; ``pending`` are image indexes.

    Raises:
        InvalidRequestError: there are more or fewer anchors than images.
    """
    anchors = {plan.anchor_token_id for plan in plans}
    places = [index for index, token in enumerate(token_ids) if token in anchors]
    matches = len(places) == len(plans) and all(
        token_ids[place] == plan.anchor_token_id for place, plan in zip(places, plans, strict=True)
    )
    if not matches:
        raise anchor_mismatch(len(places), len(plans))
    expanded: list[int] = []
    placed = []
    start = 0
    for place, plan in zip(places, plans, strict=True):
        expanded += token_ids[start:place]
        placed.append(
            PlacedImage(
                len(expanded), len(plan.placeholder_ids), plan, pending=plan.index in pending
            )
        )
        expanded += plan.placeholder_ids
        start = place + 1
    expanded += token_ids[start:]
    return ExpandedPrompt(
        tuple(expanded), tuple(placed), sum(plan.position_delta for plan in plans)
    )


def anchor_mismatch(anchors: int, images: int) -> InvalidRequestError:
    """The error of a prompt in which not every image has its own place."""
    return InvalidRequestError(
        f"the prompt has {anchors} places for images and {images} images",
        field="conversation.messages",
        reason="IMAGE_PLACES_MISMATCH",
    )
