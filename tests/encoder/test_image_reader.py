import io

import numpy as np
import pytest
from PIL import Image, ImageOps

from epd.encoding.image_header import read_header
from epd.encoding.image_limits import ImageLimits
from epd.encoding.image_reader import read_image
from epd.encoding.webp_header import read_webp_header
from epd.errors import InvalidRequestError
from tests.encoder.pictures import encoded, exif, picture, png_bomb, png_chunk

LIMITS = ImageLimits()
FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "TIFF", "BMP")


def pixels(image: Image.Image) -> np.ndarray:
    return np.asarray(image)


def plain(data: bytes) -> np.ndarray:
    """What transformers' own loading makes of a file without transparency."""
    return pixels(ImageOps.exif_transpose(Image.open(io.BytesIO(data))).convert("RGB"))


@pytest.mark.parametrize("format", FORMATS)
def test_opaque_8_bit_files_equal_plain_pillow(format: str) -> None:
    data = encoded(picture(), format)
    image = read_image(data, LIMITS, "images[0]")
    assert image.mode == "RGB"
    assert np.array_equal(pixels(image), plain(data))
    header = read_header(data, LIMITS, "images[0]")
    assert (header.format, header.width, header.height) == (format, 61, 47)


@pytest.mark.parametrize("orientation", range(1, 9))
@pytest.mark.parametrize("format", ["PNG", "JPEG", "WEBP", "TIFF"])
def test_exif_orientation_is_applied_and_the_header_knows_the_upright_size(
    format: str, orientation: int
) -> None:
    options: dict[str, object] = {"exif": exif(orientation)}
    if format == "TIFF":
        options = {"tiffinfo": {0x0112: orientation}}
    data = encoded(picture(), format, **options)
    image = read_image(data, LIMITS, "images[0]")
    assert np.array_equal(pixels(image), plain(data))
    assert image.size == ((47, 61) if orientation >= 5 else (61, 47))
    header = read_header(data, LIMITS, "images[0]")
    assert (header.width, header.height) == image.size


@pytest.mark.parametrize("late", [False, True])
def test_exif_before_or_behind_the_png_pixels_counts(late: bool) -> None:
    data = encoded(picture(), "PNG")
    chunk = png_chunk(b"eXIf", exif(6).removeprefix(b"Exif\x00\x00"))
    split = len(data) - 12 if late else 8 + 25
    data = data[:split] + chunk + data[split:]
    assert np.array_equal(pixels(read_image(data, LIMITS, "images[0]")), plain(data))
    assert read_header(data, LIMITS, "images[0]").width == 47


def test_orientation_out_of_xmp_is_applied() -> None:
    xmp = b'<x:xmpmeta xmlns:x="adobe:ns:meta/"><a tiff:Orientation="6"/></x:xmpmeta>'
    for data in (encoded(picture(), "WEBP", xmp=xmp), encoded(picture(), "JPEG", xmp=xmp)):
        assert np.array_equal(pixels(read_image(data, LIMITS, "images[0]")), plain(data))


def with_alpha() -> Image.Image:
    image = picture().convert("RGBA")
    image.putalpha(Image.fromarray(np.tile(np.arange(61, dtype=np.uint8) * 4, (47, 1))))
    return image


@pytest.mark.parametrize("format", ["PNG", "WEBP", "TIFF"])
@pytest.mark.parametrize("mode", ["RGBA", "LA"])
def test_alpha_is_composited_on_white(format: str, mode: str) -> None:
    source = with_alpha().convert(mode)
    options = {"lossless": True, "exact": True} if format == "WEBP" else {}
    if format == "WEBP":
        source = source.convert("RGBA")
    image = read_image(encoded(source, format, **options), LIMITS, "images[0]")
    rgba = source.convert("RGBA")
    white = Image.new("RGBA", rgba.size, "white")
    white.alpha_composite(rgba)
    assert np.array_equal(pixels(image), pixels(white.convert("RGB")))
    assert pixels(image)[0, 0].tolist() == [255, 255, 255]


def test_transparent_palette_entry_becomes_white() -> None:
    source = picture().quantize(16)
    data = encoded(source, "PNG", transparency=source.getpixel((0, 0)))
    image = pixels(read_image(data, LIMITS, "images[0]"))
    hidden = np.asarray(source) == source.getpixel((0, 0))
    assert (image[hidden] == 255).all()
    assert np.array_equal(image[~hidden], pixels(source.convert("RGB"))[~hidden])


@pytest.mark.parametrize("format", ["PNG", "GIF", "TIFF", "BMP"])
def test_palette_files_become_rgb(format: str) -> None:
    data = encoded(picture().quantize(32), format)
    assert np.array_equal(pixels(read_image(data, LIMITS, "images[0]")), plain(data))


@pytest.mark.parametrize("format", ["JPEG", "TIFF"])
def test_cmyk_files_become_rgb(format: str) -> None:
    data = encoded(picture().convert("CMYK"), format)
    assert Image.open(io.BytesIO(data)).mode == "CMYK"
    assert np.array_equal(pixels(read_image(data, LIMITS, "images[0]")), plain(data))


@pytest.mark.parametrize("format", ["PNG", "TIFF"])
def test_16_bit_grey_keeps_the_high_byte(format: str) -> None:
    levels = np.arange(61 * 47, dtype=np.uint16).reshape(47, 61) * 20
    image = read_image(encoded(Image.fromarray(levels), format), LIMITS, "images[0]")
    assert np.array_equal(pixels(image)[..., 0], levels >> 8)


@pytest.mark.parametrize("format", ["GIF", "WEBP", "PNG", "TIFF"])
def test_first_frame_of_an_animation_counts(format: str) -> None:
    frames = [picture(seed=n) for n in range(3)]
    data = encoded(frames[0], format, save_all=True, append_images=frames[1:])
    assert getattr(Image.open(io.BytesIO(data)), "n_frames", 1) == 3
    assert np.array_equal(pixels(read_image(data, LIMITS, "images[0]")), plain(data))


def test_one_pixel_and_bilevel_files_are_read() -> None:
    assert read_image(encoded(picture(1, 1), "PNG"), LIMITS, "images[0]").size == (1, 1)
    data = encoded(picture().convert("1"), "TIFF")
    assert np.array_equal(pixels(read_image(data, LIMITS, "images[0]")), plain(data))


@pytest.mark.parametrize("lossless", [False, True])
@pytest.mark.parametrize("metadata", [False, True])
def test_webp_size_is_known_without_the_decoder(lossless: bool, metadata: bool) -> None:
    options: dict[str, object] = {"exif": exif(1)} if metadata else {}
    header = read_webp_header(encoded(picture(), "WEBP", lossless=lossless, **options))
    assert (header.width, header.height, header.exif is not None) == (61, 47, metadata)


BAD_FILES = {
    "empty": (b"", "IMAGE_EMPTY"),
    "text": (b"not an image at all, only text", "IMAGE_UNREADABLE"),
    "readable but unwanted format": (encoded(picture(), "PPM"), "IMAGE_UNREADABLE"),
    "float samples": (encoded(picture().convert("F"), "TIFF"), "IMAGE_FORMAT"),
    "32-bit samples": (encoded(picture().convert("I"), "TIFF"), "IMAGE_FORMAT"),
    "png bomb": (png_bomb(), "IMAGE_TOO_LARGE"),
    "side ratio": (encoded(picture(1, 500), "PNG"), "IMAGE_SIDE_RATIO"),
    "signature only": (b"\x89PNG\r\n\x1a\n", "IMAGE_UNREADABLE"),
    "riff only": (b"RIFF\x00\x00\x00\x00WEBP", "IMAGE_UNREADABLE"),
} | {
    f"truncated {format}": (encoded(picture(), format)[:-400], "IMAGE_UNREADABLE")
    for format in FORMATS
}


@pytest.mark.parametrize(("data", "reason"), BAD_FILES.values(), ids=BAD_FILES.keys())
def test_bad_files_are_refused_naming_the_image(data: bytes, reason: str) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        read_image(data, LIMITS, "images[3]")
    assert caught.value.field == "images[3]"
    assert caught.value.reason == reason
    assert "images[3]" in caught.value.message


def test_errors_name_both_numbers() -> None:
    with pytest.raises(InvalidRequestError, match=r"100000000 pixels, allowed are 50000000"):
        read_header(png_bomb(10_000, 10_000), LIMITS, "images[0]")
    with pytest.raises(InvalidRequestError, match=r"the 50000000 allowed: .*3600000000 pixels"):
        read_header(png_bomb(60_000, 60_000), LIMITS, "images[0]")
    with pytest.raises(InvalidRequestError, match="has 9 bytes, allowed are 8"):
        read_header(b"123456789", ImageLimits(max_bytes=8), "images[0]")
    with pytest.raises(InvalidRequestError, match="33 images in one call, allowed are 1 to 32"):
        LIMITS.check_count(33)
    only_png = ImageLimits(formats=frozenset({"PNG"}))
    with pytest.raises(InvalidRequestError, match="is a BMP file, allowed are PNG"):
        read_header(encoded(picture(), "BMP"), only_png, "images[0]")


def test_webp_bomb_is_refused_before_libwebp_sees_it() -> None:
    data = bytearray(encoded(with_alpha(), "WEBP"))
    assert data[12:16] == b"VP8X"
    data[24:30] = (16_000).to_bytes(3, "little") * 2
    with pytest.raises(InvalidRequestError, match="allowed are 50000000"):
        read_header(bytes(data), LIMITS, "images[0]")
