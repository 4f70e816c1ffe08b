"""Which encoder gets which image, without a network."""

import math
from collections import Counter
from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from epd.image_size import estimated_pixels
from services.router.encoder_placement import EncoderPlacement
from services.router.prompt import SourceImage
from tests.encoder.pictures import encoded, picture


@dataclass
class Candidate:
    address: str
    load: int


def candidates(*loads: int) -> list[Candidate]:
    return [Candidate(f"10.0.0.{index}:1", load) for index, load in enumerate(loads)]


def images(*pixels: int, first: int = 0) -> list[SourceImage]:
    return [
        SourceImage(index, b"file", (first + index).to_bytes(32), size)
        for index, size in enumerate(pixels)
    ]


def homes(placement: EncoderPlacement, pool: list[Candidate], count: int) -> list[str]:
    """Where images go that come alone."""
    found = []
    for number in range(count):
        groups, _ = placement.place(images(1, first=number), pool)
        (home,) = (one.address for one, group in zip(pool, groups, strict=True) if group)
        found.append(home)
    return found


@pytest.mark.parametrize("encoders", [2, 4])
@pytest.mark.parametrize("first", range(0, 80, 8))
def test_new_images_of_one_request_are_spread_evenly(encoders: int, first: int) -> None:
    pool = candidates(*[0] * encoders)
    groups, _ = EncoderPlacement(100).place(images(*[1000] * 8, first=first), pool)
    assert [len(group) for group in groups] == [8 // encoders] * encoders


@given(
    pixels=st.lists(st.integers(1, 1 << 20), min_size=1, max_size=16),
    loads=st.lists(st.integers(0, 20), min_size=1, max_size=5),
)
def test_no_encoder_gets_more_than_an_even_share_and_one_image(
    pixels: list[int], loads: list[int]
) -> None:
    groups, _ = EncoderPlacement(100).place(images(*pixels), candidates(*loads))
    assert sorted(image.index for group in groups for image in group) == list(range(len(pixels)))
    mean = sum(pixels) / len(pixels)
    even = (sum(loads) + len(pixels)) / len(loads)
    for load, group in zip(loads, groups, strict=True):
        weights = [image.pixels / mean for image in group]
        if weights:
            assert load + sum(weights) <= even + max(pixels) / mean + 1e-3


def test_one_large_image_is_as_much_as_many_small_ones() -> None:
    groups, _ = EncoderPlacement(100).place(
        images(100, 100, 800, 100, 100, 100, 100, 100, 100), candidates(0, 0)
    )
    assert sorted(len(group) for group in groups) == [1, 8]


def test_an_image_that_had_to_leave_its_home_is_found_where_it_went() -> None:
    placement, pool = EncoderPlacement(100), candidates(0, 0)
    groups, _ = placement.place(images(*[1000] * 8), pool)
    went = {image.digest: number for number, group in enumerate(groups) for image in group}
    for number in range(8):  # alone, in another order, with new neighbours
        again, first_choices = placement.place(images(1000, first=7 - number), pool)
        assert first_choices == 1
        assert went[(7 - number).to_bytes(32)] == [len(group) for group in again].index(1)


def test_a_content_keeps_its_home_while_others_come_and_go() -> None:
    pool = candidates(*[0] * 5)
    before = homes(EncoderPlacement(1), pool, 200)
    after = homes(EncoderPlacement(1), pool[1:], 200)
    assert all(now == was or was == pool[0].address for was, now in zip(before, after, strict=True))
    assert all(count >= 20 for count in Counter(before).values())


def test_a_holder_with_much_to_do_is_passed_over() -> None:
    placement, pool = EncoderPlacement(100), candidates(0, 0)
    (home,) = homes(placement, pool, 1)
    for load in range(10):
        pool = [Candidate(one.address, load if one.address == home else 0) for one in pool]
        (now,) = homes(EncoderPlacement(100), pool, 1)
        assert (now == home) == (load + 1 <= max(1, (load + 1) / 2))
        (known,) = homes(_knowing(home), pool, 1)
        assert (known == home) == (load + 1 <= math.ceil(1.25 * (load + 1) / 2))


def _knowing(address: str) -> EncoderPlacement:
    placement = EncoderPlacement(100)
    placement.place(images(1), [Candidate(address, 0)])
    return placement


def test_equal_images_of_a_request_meet_at_one_encoder() -> None:
    same = [SourceImage(index, b"file", bytes(32), 1000) for index in range(6)]
    groups, _ = EncoderPlacement(100).place(same, candidates(0, 0))
    assert sorted(len(group) for group in groups) == [0, 6]


def test_what_is_remembered_is_bounded() -> None:
    placement = EncoderPlacement(10)
    homes(placement, candidates(0, 0), 50)
    assert len(placement._holders) == 10


@pytest.mark.parametrize("format", ["PNG", "JPEG", "WEBP", "GIF", "BMP"])
def test_pixels_are_known_from_the_header(format: str) -> None:
    assert estimated_pixels(encoded(picture(131, 77), format)) == 131 * 77


def test_what_has_no_known_header_counts_by_its_length() -> None:
    tiff = encoded(picture(), "TIFF")
    assert estimated_pixels(tiff) == len(tiff)
    jpeg = encoded(picture(), "JPEG")
    for length in range(200):
        assert estimated_pixels(jpeg[:length]) >= 1
    assert estimated_pixels(b"") == 1
