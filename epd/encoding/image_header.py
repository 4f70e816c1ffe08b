"""Format, upright size and orientation of an image file, known without decoding a pixel.

The size decides the patch grid, hence the memory and the place in the prompt; so an image can be
planned, or refused, before it costs anything.
"""

import io
import struct
import warnings
from dataclasses import dataclass, replace

from PIL import ExifTags, Image, PngImagePlugin, TiffImagePlugin

from epd.encoding.image_limits import READABLE_FORMATS, ImageLimits
from epd.encoding.webp_header import read_webp_header
from epd.errors import InvalidRequestError

_PILLOW_FORMATS = tuple(f for f in READABLE_FORMATS if f != "WEBP")
#: EXIF orientations that lay the picture on its side.
SWAPS_SIDES = range(5, 9)
_PNG_SIGNATURE = b"\x89PNG\r\n\x1a\n"
_EXIF_PREFIX = b"Exif\x00\x00"


@dataclass(frozen=True)
class ImageHeader:
    """``width`` and ``height`` are those of the upright picture, in pixels.

    ``orientation`` is the EXIF value (1 to 8) that the decoded pixels still need applied; 1 when
    they come out upright.
    """

    format: str
    width: int
    height: int
    orientation: int


def read_header(data: bytes, limits: ImageLimits, field: str) -> ImageHeader:
    """Reads and checks the header of an image file.

    Args:
        data: The whole file.
        limits: What is allowed.
        field: Path of the image in the request, named in errors.

    Raises:
        InvalidRequestError: empty, too long, not one of the readable formats, broken, or over a
            limit.
    """
    limits.check_bytes(len(data), field)
    try:
        if data[:4] == b"RIFF" and data[8:12] == b"WEBP":
            header = _webp_header(data)
        else:
            header = _pillow_header(data)
    except Image.DecompressionBombError as error:  # Pillow's own bound is above any of ours
        raise InvalidRequestError(
            f"{field} has more pixels than the {limits.max_pixels} allowed: {error}",
            field=field,
            reason="IMAGE_TOO_LARGE",
        ) from error
    except Exception as error:  # parsers of hostile bytes raise nearly everything
        raise unreadable(field, error) from error
    if header.format not in limits.formats:
        raise InvalidRequestError(
            f"{field} is a {header.format} file, allowed are {', '.join(sorted(limits.formats))}",
            field=field,
            reason="IMAGE_FORMAT",
        )
    limits.check_size(header.width, header.height, field)
    return header


def silence_decoders() -> None:
    """Keeps what Pillow has to say about odd files out of this process's log and memory: hostile
    files can make it say something new each time, and Python remembers every warning."""
    warnings.filterwarnings("ignore", module=r"PIL\.")


def unreadable(field: str, error: Exception) -> InvalidRequestError:
    """The error for a file that no decoder makes sense of. The parser's own text stays out of it:
    it may quote the file."""
    return InvalidRequestError(
        f"{field} is not a readable PNG, JPEG, WebP, GIF, TIFF or BMP file "
        f"({type(error).__name__})",
        field=field,
        reason="IMAGE_UNREADABLE",
    )


def _webp_header(data: bytes) -> ImageHeader:
    webp = read_webp_header(data)
    probe = Image.new("1", (1, 1))  # carries the metadata to Pillow's own reading of it
    if webp.exif:
        probe.info["exif"] = webp.exif
    if webp.xmp:
        probe.info["xmp"] = webp.xmp
    return _upright("WEBP", (webp.width, webp.height), _orientation(probe))


def _pillow_header(data: bytes) -> ImageHeader:
    with Image.open(io.BytesIO(data), formats=_PILLOW_FORMATS) as image:
        # MPO is the JPEG of cameras and phones that carries further pictures behind the first.
        name = "JPEG" if image.format == "MPO" else image.format or "unknown"
        if isinstance(image, PngImagePlugin.PngImageFile):
            _add_late_png_exif(image, data)
        orientation = _orientation(image)
        if not isinstance(image, TiffImagePlugin.TiffImageFile):
            return _upright(name, image.size, orientation)
        # Pillow turns TIFF pixels upright while decoding. Its size says so already where the
        # orientation is a TIFF tag; from XMP it learns it only then.
        told_by_tag = ExifTags.Base.Orientation in image.tag_v2
        turned = _upright(name, image.size, 1 if told_by_tag else orientation)
        return replace(turned, orientation=1)


def _upright(name: str, size: tuple[int, int], orientation: int) -> ImageHeader:
    width, height = reversed(size) if orientation in SWAPS_SIDES else size
    return ImageHeader(name, width, height, orientation)


def _orientation(image: Image.Image) -> int:
    # Image.getexif itself: the PNG override decodes the whole picture first.
    value = Image.Image.getexif(image).get(ExifTags.Base.Orientation, 1)
    return value if isinstance(value, int) and 1 <= value <= 8 else 1


def _add_late_png_exif(image: PngImagePlugin.PngImageFile, data: bytes) -> None:
    """Finds an eXIf chunk behind the pixels, where Pillow sees it only after decoding."""
    if "exif" in image.info:
        return
    position = len(_PNG_SIGNATURE)
    while position + 8 <= len(data):
        length, kind = struct.unpack_from(">I4s", data, position)
        if kind in (b"IEND", b"fcTL"):  # fcTL starts a later frame, where Pillow stops too
            return
        if kind == b"eXIf":
            image.info["exif"] = _EXIF_PREFIX + data[position + 8 : position + 8 + length]
            return
        position += 12 + length
