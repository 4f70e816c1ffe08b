"""Image files to upright RGB pictures, by fixed rules.

- EXIF orientation is applied.
- The first frame of an animation or page of a TIFF counts.
- Transparency is composited on white.
- 16-bit samples keep their high byte, as Pillow itself does for 16-bit colour. A transparent grey
  level of such a file is ignored.
- 32-bit integer and float samples are refused: nothing says which value is white.
- Palette, CMYK, YCbCr, Lab and grey become RGB by Pillow's conversion; ICC profiles are ignored.
"""

import io

import numpy as np
from PIL import Image

from epd.encoding.image_header import read_header, unreadable
from epd.encoding.image_limits import READABLE_FORMATS, ImageLimits
from epd.encoding.jpeg_draft import JpegDraft
from epd.errors import InvalidRequestError

_WHITE = (255, 255, 255, 255)
_TURNS = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}


def read_image(
    data: bytes, limits: ImageLimits, field: str, draft: JpegDraft | None = None
) -> Image.Image:
    """Decodes an image file into an upright RGB picture of the size its header promised.

    Memory and time grow with the pixels, so this runs in a preprocessing process. With ``draft`` a
    JPEG file of several times the draft's size comes out in the draft's size.

    Raises:
        InvalidRequestError: whatever :func:`read_header` refuses; broken or truncated pixel data;
            samples of a kind that has no white.
    """
    header = read_header(data, limits, field)
    box = None
    try:
        with Image.open(io.BytesIO(data), formats=READABLE_FORMATS) as image:
            box = None if draft is None else draft.begin(image, header)
            image.load()
            if image.mode in ("I", "F"):
                raise InvalidRequestError(
                    f"{field} has 32-bit samples, readable are 8 and 16 bits",
                    field=field,
                    reason="IMAGE_FORMAT",
                )
            picture = _to_rgb(image)
    except InvalidRequestError:
        raise
    except Exception as error:  # decoders of hostile bytes raise nearly everything
        raise unreadable(field, error) from error
    if draft is not None and box is not None:
        picture, promised = draft.finish(picture, box, header), (draft.width, draft.height)
    else:
        promised = (header.width, header.height)
    if header.orientation in _TURNS:
        picture = picture.transpose(_TURNS[header.orientation])
    if picture.size != promised:
        raise InvalidRequestError(
            f"{field} announces {header.width} by {header.height} pixels "
            f"and has {picture.width} by {picture.height}",
            field=field,
            reason="IMAGE_UNREADABLE",
        )
    return picture


def _to_rgb(image: Image.Image) -> Image.Image:
    if image.mode.startswith("I;16"):
        return Image.fromarray(_high_bytes(image)).convert("RGB")
    if image.has_transparency_data:
        rgba = image.convert("RGBA")
        return Image.alpha_composite(Image.new("RGBA", rgba.size, _WHITE), rgba).convert("RGB")
    return image.convert("RGB")


def _high_bytes(image: Image.Image) -> np.ndarray[tuple[int, ...], np.dtype[np.uint8]]:
    return (np.asarray(image) >> 8).astype(np.uint8)
