"""What coarse decoding of JPEG files changes, and that it is off by default."""

import numpy as np
import pytest
from PIL import Image, ImageDraw

from epd.encoding.encoding_config import EncodingConfig
from epd.encoding.image_limits import ImageLimits
from epd.encoding.image_reader import read_image
from epd.encoding.jpeg_draft import JpegDraft
from epd.engine.families.base import ModelFamily
from tests.encoder.calls import Caller
from tests.encoder.conftest import MakeEncoder
from tests.encoder.pictures import encoded, exif, picture

TARGET = (168, 126)
DRAFT = JpegDraft(*TARGET, resample=Image.Resampling.BICUBIC)


def photo(width: int, height: int) -> Image.Image:
    """Detail at every scale, less the finer it is, as in photographs."""
    generator = np.random.default_rng(0)
    pixels = np.zeros((height, width, 3))
    scale = 2
    while scale < max(width, height):
        coarse = generator.random((max(2, height // scale), max(2, width // scale), 3))
        layer = Image.fromarray((coarse * 255).astype(np.uint8)).resize((width, height))
        pixels += np.asarray(layer, dtype=float) * scale**0.5
        scale *= 2
    return Image.fromarray((pixels * (255 / pixels.max())).astype(np.uint8))


def page(width: int, height: int) -> Image.Image:
    """Small print: nearly all of it is lost at the target size anyway."""
    image = Image.new("RGB", (width, height), "white")
    pen = ImageDraw.Draw(image)
    for row in range(0, height, 24):
        pen.text(
            (5, row), "the quick brown fox jumps over the lazy dog " * 8, fill=(row % 255, 0, 9)
        )
    return image


def differences(data: bytes, draft: JpegDraft = DRAFT) -> np.ndarray:
    """Per sample of 0 to 255, between the whole picture resized and the draft."""
    size = (draft.width, draft.height)
    whole = read_image(data, ImageLimits(), "image").resize(size, Image.Resampling.BICUBIC)
    drafted = read_image(data, ImageLimits(), "image", draft)
    assert drafted.size == size
    return np.abs(np.asarray(whole, dtype=int) - np.asarray(drafted, dtype=int))


@pytest.mark.parametrize(
    ("image", "most_mean", "most"),
    [
        (photo(1400, 1050), 0.5, 4),
        (photo(1401, 1047), 0.5, 4),
        (photo(700, 525).convert("L"), 0.5, 4),
        (page(1400, 1050), 4.0, 64),
    ],
    ids=["photo", "sides that are no multiple of 8", "grey", "small print"],
)
def test_the_difference_is_bounded(image: Image.Image, most_mean: float, most: int) -> None:
    found = differences(encoded(image, "JPEG", quality=90))
    assert found.mean() <= most_mean
    assert found.max() <= most


@pytest.mark.parametrize("orientation", range(1, 9))
def test_a_turned_file_comes_out_upright(orientation: int) -> None:
    data = encoded(photo(1400, 1050), "JPEG", quality=90, exif=exif(orientation))
    width, height = reversed(TARGET) if orientation > 4 else TARGET
    upright = JpegDraft(width, height, resample=DRAFT.resample)
    assert differences(data, upright).max() <= 4


@pytest.mark.parametrize(
    "data",
    [encoded(photo(330, 250), "JPEG"), encoded(photo(1400, 1050), "PNG"),
     encoded(photo(1400, 1050).convert("CMYK"), "JPEG")],
    ids=["small", "PNG", "CMYK"],
)  # fmt: skip
def test_other_files_are_decoded_whole(data: bytes) -> None:
    whole = read_image(data, ImageLimits(), "image")
    assert whole == read_image(data, ImageLimits(), "image", DRAFT)


async def test_it_is_off_unless_asked_for_and_then_gives_an_image_another_digest(
    family: ModelFamily, digest_of_model: str, make_encoder: MakeEncoder
) -> None:
    plain, drafting = EncodingConfig(), EncodingConfig(jpeg_draft=True)
    assert plain.processor_digest(family) == family.processor_digest
    assert drafting.processor_digest(family) != family.processor_digest
    data = encoded(picture(1200, 900), "JPEG")
    whole, drafted = await make_encoder(), await make_encoder(jpeg_draft=True)
    first = await Caller(family.processor_digest, digest_of_model).encode(whole, data)
    second = await Caller(drafting.processor_digest(family), digest_of_model).encode(drafted, data)
    one, other = first.planned[0].handle, second.planned[0].handle
    assert one.spec == other.spec
    assert one.digest != other.digest
    difference = whole.embedding(one.handle_id) - drafted.embedding(other.handle_id)
    assert 0 < difference.abs().max() < 0.5
