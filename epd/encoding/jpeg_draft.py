"""Decoding a JPEG file at a fraction of its size when the model sees a fraction of it anyway.

libjpeg can leave out the high frequencies of every 8 x 8 block and give 1/2, 1/4 or 1/8 of the
sides. That is not what resizing the whole picture gives, only close: ``docs/operations.md`` tells
how close, and ``tests/encoder/test_jpeg_draft.py`` bounds it.
"""

from dataclasses import dataclass

from PIL import Image, JpegImagePlugin

from epd.encoding.image_header import SWAPS_SIDES, ImageHeader

#: What is decoded has at least so many times the sides of what the model sees. The rest of the way
#: goes the processor's own filter, which hides most of what the coarse decoding has changed.
MARGIN = 2

#: The part of a coarsely decoded picture that the file's pixels fill: left, top, right, bottom.
#: Sides that are no multiple of 8 leave a strip that they fill partly.
Box = tuple[float, float, float, float]


@dataclass(frozen=True)
class JpegDraft:
    """The upright size that the model's processor would resize the whole picture to.

    ``resample`` is the processor's own filter, as Pillow numbers it. An image of exactly this size
    passes the processor unresized.
    """

    width: int
    height: int
    resample: int

    def begin(self, image: Image.Image, header: ImageHeader) -> Box | None:
        """Chooses the fraction before the pixels are loaded; None when there is none to gain."""
        if not isinstance(image, JpegImagePlugin.JpegImageFile) or image.mode not in ("RGB", "L"):
            return None
        full = image.size
        width, height = self._lying(header)
        drafted = image.draft(image.mode, (MARGIN * width, MARGIN * height))
        return drafted[1] if drafted is not None and image.size != full else None

    def finish(self, picture: Image.Image, box: Box, header: ImageHeader) -> Image.Image:
        """The rest of the way, before the picture is turned upright."""
        return picture.resize(self._lying(header), Image.Resampling(self.resample), box=box)

    def _lying(self, header: ImageHeader) -> tuple[int, int]:
        """The size before the picture is turned upright."""
        swaps = header.orientation in SWAPS_SIDES
        return (self.height, self.width) if swaps else (self.width, self.height)
