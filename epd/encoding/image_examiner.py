"""The first look at the images of a call, off the event loop."""

import asyncio
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

from epd.encoding.encode_events import ImageInput
from epd.encoding.image_header import ImageHeader, read_header, silence_decoders
from epd.encoding.image_limits import ImageLimits
from epd.errors import InvalidRequestError
from epd.image_digest import image_digest


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
    ) -> list[ImageHeader | None]:
        """Checks every image; reads the header of those for which ``headers_of`` says so.

        Raises:
            InvalidRequestError: a count, size, digest or header is not acceptable; names the image.
        """
        self._limits.check_count(len(images))
        for image in images:
            self._limits.check_bytes(len(image.data), _field(image))
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

    def _examine(self, image: ImageInput, with_header: bool) -> ImageHeader | None:
        digest = image_digest(self._model_digest, self._processor_digest, image.data)
        if digest != image.digest:
            raise InvalidRequestError(
                f"{_field(image)}: the digest {image.digest.hex() or 'is empty'} is not that of "
                f"the data, {digest.hex()}",
                field=f"{_field(image)}.digest",
                reason="DIGEST_MISMATCH",
            )
        return read_header(image.data, self._limits, _field(image)) if with_header else None


def _field(image: ImageInput) -> str:
    return f"images[{image.image_index}]"
