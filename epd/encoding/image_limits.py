"""What an image may be, checked on the file's header before any pixel memory is allocated."""

from dataclasses import dataclass

from epd.errors import InvalidRequestError

#: Formats read here, as Pillow names them.
READABLE_FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "TIFF", "BMP")


@dataclass(frozen=True)
class ImageLimits:
    """Bounds on the images of a request. Pixels and sides are those of the file, before resizing.

    The default pixel bound lets a 50-megapixel photo in; decoded it takes 150 MB.
    """

    max_bytes: int = 20 * 1024 * 1024
    max_pixels: int = 50_000_000
    max_side_ratio: float = 200.0
    max_images: int = 32
    max_video_frames: int = 64
    max_video_pixels: int = 100_000_000
    formats: frozenset[str] = frozenset(READABLE_FORMATS)

    def check_count(self, image_count: int) -> None:
        """Raises InvalidRequestError when a call carries no image or too many."""
        if not 1 <= image_count <= self.max_images:
            raise InvalidRequestError(
                f"{image_count} images in one call, allowed are 1 to {self.max_images}",
                field="images",
                reason="IMAGE_COUNT",
            )

    def check_bytes(self, byte_count: int, field: str) -> None:
        """Raises InvalidRequestError naming ``field`` when a file is empty or too long."""
        if byte_count == 0:
            raise InvalidRequestError(f"{field} is empty", field=field, reason="IMAGE_EMPTY")
        if byte_count > self.max_bytes:
            raise InvalidRequestError(
                f"{field} has {byte_count} bytes, allowed are {self.max_bytes}",
                field=field,
                reason="IMAGE_TOO_LARGE",
            )

    def check_video_pixels(self, pixels: int, field: str) -> None:
        """Raises InvalidRequestError naming ``field`` when all frames have too many together."""
        if pixels > self.max_video_pixels:
            raise InvalidRequestError(
                f"the frames of {field} have {pixels} pixels together, allowed are "
                f"{self.max_video_pixels}",
                field=field,
                reason="VIDEO_TOO_LARGE",
            )

    def check_size(self, width: int, height: int, field: str) -> None:
        """Raises InvalidRequestError naming ``field`` when sides, area or side ratio are bad."""
        if width < 1 or height < 1:
            raise InvalidRequestError(
                f"{field} is {width} by {height} pixels, both sides must be 1 or more",
                field=field,
                reason="IMAGE_UNREADABLE",
            )
        if width * height > self.max_pixels:
            raise InvalidRequestError(
                f"{field} is {width} by {height} = {width * height} pixels, "
                f"allowed are {self.max_pixels}",
                field=field,
                reason="IMAGE_TOO_LARGE",
            )
        ratio = max(width, height) / min(width, height)
        if ratio > self.max_side_ratio:
            raise InvalidRequestError(
                f"{field} is {width} by {height} pixels, a side ratio of {ratio:.1f}, "
                f"allowed is {self.max_side_ratio:g}",
                field=field,
                reason="IMAGE_SIDE_RATIO",
            )
