"""Images into a prompt: each anchor token becomes its image's placeholders."""

from collections.abc import Sequence
from dataclasses import dataclass

from epd.engine.families.base import ImagePlan
from epd.engine.requests import PromptImage
from epd.errors import InvalidRequestError
from services.decode.request import DecodeJob, LocalImage


@dataclass(frozen=True)
class ExpandedPrompt:
    """What the engine is given; replayed tokens stay at the end."""

    token_ids: tuple[int, ...]
    images: tuple[PromptImage, ...]
    position_delta: int


def expand_images(
    job: DecodeJob, images: Sequence[LocalImage], plans: Sequence[ImagePlan]
) -> ExpandedPrompt:
    """The prompt with every image's placeholders, in order.

    Raises:
        InvalidRequestError: the token at an image's anchor is not the model's anchor token.
    """
    token_ids: list[int] = []
    placed: list[PromptImage] = []
    after = 0
    for index, (image, plan) in enumerate(zip(images, plans, strict=True)):
        anchor = job.token_ids[image.anchor_index]
        if anchor != plan.anchor_token_id:
            raise InvalidRequestError(
                f"token {image.anchor_index} is {anchor}, images go where {plan.anchor_token_id} "
                "stands",
                field=f"local.images[{index}].anchor_index",
            )
        token_ids += job.token_ids[after : image.anchor_index]
        placed.append(
            PromptImage(len(token_ids), len(plan.placeholder_ids), image.digest, plan.grid)
        )
        token_ids += plan.placeholder_ids
        after = image.anchor_index + 1
    token_ids += job.token_ids[after:]
    return ExpandedPrompt(
        tuple(token_ids), tuple(placed), sum(plan.position_delta for plan in plans)
    )
