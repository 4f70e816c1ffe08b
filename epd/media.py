"""What a client shows a model: an image file, or a video as frames."""

import itertools
import math
from dataclasses import dataclass, field

from epd.errors import InvalidRequestError


@dataclass(frozen=True)
class Video:
    """Frames in order, each an image file, and when each is shown, in seconds from the start."""

    frames: tuple[bytes, ...] = field(repr=False)
    timestamps_s: tuple[float, ...]

    def check(self, path: str, max_frames: int) -> None:
        """Checks all that can be told without looking into the files.

        Args:
            path: Where the video stands in the request, named in errors.
            max_frames: Most frames.

        Raises:
            InvalidRequestError: no or too many frames, or timestamps that are not one per frame,
                finite, not negative and rising.
        """
        if not 1 <= len(self.frames) <= max_frames:
            raise InvalidRequestError(
                f"{path} has {len(self.frames)} frames, allowed are 1 to {max_frames}",
                field=f"{path}.frames",
                reason="VIDEO_FRAMES",
            )
        times = self.timestamps_s
        rising = all(a < b for a, b in itertools.pairwise(times))
        if (
            len(times) != len(self.frames)
            or not rising
            or not all(math.isfinite(time) and time >= 0 for time in times)
        ):
            raise InvalidRequestError(
                f"{path} needs a timestamp per frame, in seconds from 0 on and rising",
                field=f"{path}.timestamps_s",
                reason="VIDEO_TIMESTAMPS",
            )


#: An image file or a video.
Media = bytes | Video


def media_files(media: Media) -> tuple[bytes, ...]:
    """The image files it consists of."""
    return media.frames if isinstance(media, Video) else (media,)
