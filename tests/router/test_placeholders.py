"""Image placeholders take the place of anchors."""

import pytest

from epd.errors import InvalidRequestError
from epd.v1 import common_pb2
from services.router.placeholders import ImagePlan, expand


def plan(index: int, *placeholders: int, anchor: int = 9, delta: int = 0) -> ImagePlan:
    return ImagePlan(
        index=index,
        grid=common_pb2.ImageGrid(),
        anchor_token_id=anchor,
        placeholder_ids=placeholders,
        position_delta=delta,
        handle=common_pb2.EmbeddingHandle(),
        cache_hit=False,
    )


def test_the_nth_image_replaces_the_nth_anchor() -> None:
    expanded = expand([1, 9, 2, 9], [plan(0, 9, 9, 8, delta=-1), plan(1, 9, delta=-2)])
    assert expanded.token_ids == (1, 9, 9, 8, 2, 9)
    assert [(image.offset, image.length) for image in expanded.images] == [(1, 3), (5, 1)]
    assert expanded.position_delta == -3
    assert expanded.image_tokens == 4


def test_neighbouring_anchors_and_empty_prompts_work() -> None:
    assert expand([9, 9], [plan(0, 7, 7), plan(1, 6)]).token_ids == (7, 7, 6)
    assert expand([], []).token_ids == ()


@pytest.mark.parametrize("tokens", [[1, 2], [9, 9, 9], [9]])
def test_more_or_fewer_anchors_than_images_are_refused(tokens: list[int]) -> None:
    with pytest.raises(InvalidRequestError) as raised:
        expand(tokens, [plan(0, 9), plan(1, 9)])
    assert raised.value.reason == "IMAGE_PLACES_MISMATCH"


def test_images_of_different_kinds_keep_their_order() -> None:
    with pytest.raises(InvalidRequestError):
        expand([8, 9], [plan(0, 1, anchor=9), plan(1, 1, anchor=8)])
    assert expand([9, 8], [plan(0, 1, anchor=9), plan(1, 2, anchor=8)]).token_ids == (1, 2)
