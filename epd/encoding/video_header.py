"""Times and size of a video's frames, known without decoding a pixel."""

from dataclasses import dataclass

from epd.encoding.image_header import read_header
from epd.encoding.image_limits import ImageLimits
from epd.errors import InvalidRequestError
from epd.media import Video


@dataclass(frozen=True)
class VideoHeader:
    """Each frame's time, and ``width`` and ``height`` of every upright frame, in pixels."""

    timestamps_s: tuple[float, ...]
    width: int
    height: int


def read_video_header(video: Video, limits: ImageLimits, field: str) -> VideoHeader:
    """Reads and checks the headers of all frames.

    Raises:
        InvalidRequestError: a frame or the whole is over a limit, a frame is not readable, or
            frames differ in size; names the frame.
    """
    video.check(f"{field}.video", limits.max_video_frames)
    sizes = []
    for index, data in enumerate(video.frames):
        path = f"{field}.video.frames[{index}]"
        header = read_header(data, limits, path)
        sizes.append((header.width, header.height))
        if sizes[-1] != sizes[0]:
            raise InvalidRequestError(
                f"{path} is {header.width} by {header.height} pixels, the first frame "
                f"{sizes[0][0]} by {sizes[0][1]}",
                field=path,
                reason="VIDEO_FRAME_SIZE",
            )
    width, height = sizes[0]
    limits.check_video_pixels(len(sizes) * width * height, f"{field}.video")
    return VideoHeader(video.timestamps_s, width, height)
