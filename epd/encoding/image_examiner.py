"""The first look at the images of a call, off the event loop."""

import asyncio
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

from epd.encoding.encode_events import ImageInput
from epd.encoding.image_header import ImageHeader, read_header, silence_decoders
from epd.encoding.image_limits import ImageLimits
from epd.encoding.video_header import VideoHeader, read_video_header
from epd.errors import InvalidRequestError
from epd.image_digest import media_digest
from epd.media import Video, media_files

#: What is known of an image or a video before it is decoded.
MediaHeader = ImageHeader | VideoHeader


class ImageExaminer:
    """Checks digests and reads headers on a thread of its own; decodes nothing.

    The digest is what the cache trusts, so it is computed again: a wrong one would hand out, or
    plant, the embedding of another image.
    """

    def __init__(self, model_digest: str, processor_digest: str, limits: ImageLimits) -> None:
        self._model_digest = model_digest
        self._processor_digest = processor_digest
        self._limits = limits
        silence_decoders()
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="image-examiner")

    async def examine(
        self, images: Sequence[ImageInput], headers_of: Sequence[bool]
    ) -> list[MediaHeader | None]:
        """Checks every image; reads the header of those for which ``headers_of`` says so.

        Raises:
            InvalidRequestError: a count, size, digest or header is not acceptable; names the image.
        """
        self._limits.check_count(len(images))
        for image in images:
            for file in media_files(image.data):
                self._limits.check_bytes(len(file), _field(image))
        return await asyncio.get_running_loop().run_in_executor(
            self._thread,
            lambda: [
                self._examine(image, with_header)
                for image, with_header in zip(images, headers_of, strict=True)
            ],
        )

    def stop(self) -> None:
        """Ends the thread after what it does."""
        self._thread.shutdown(wait=False, cancel_futures=True)

    def _examine(self, image: ImageInput, with_header: bool) -> MediaHeader | None:
        digest = media_digest(self._model_digest, self._processor_digest, image.data)
        if digest != image.digest:
            raise InvalidRequestError(
                f"{_field(image)}: the digest {image.digest.hex() or 'is empty'} is not that of "
                f"the data, {digest.hex()}",
                field=f"{_field(image)}.digest",
                reason="DIGEST_MISMATCH",
            )
        if not with_header:
            return None
        if isinstance(image.data, Video):
            return read_video_header(image.data, self._limits, _field(image))
        return read_header(image.data, self._limits, _field(image))


def _field(image: ImageInput) -> str:
    return f"images[{image.image_index}]"
