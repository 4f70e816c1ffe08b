"""When the frames of a video are shown: said by the video, or for all of a request's at once."""

from collections.abc import Sequence
from dataclasses import dataclass

from epd.errors import InvalidRequestError
from services.router.http.fields import Fields


@dataclass(frozen=True)
class FrameTimes:
    """Times in seconds, or ``fps`` frames a second.

    ``indices`` are the frames' places in the video they are taken from, which has ``fps``; without
    them every frame is there. Default as in vLLM: one frame a second.
    """

    fps: float = 1.0
    indices: tuple[float, ...] = ()
    seconds: tuple[float, ...] = ()
    #: Where it was said.
    path: str = ""

    def of(self, count: int) -> tuple[float, ...]:
        """One time per frame; whether they rise is for the video to check.

        Raises:
            InvalidRequestError: they are said for another number of frames.
        """
        times: Sequence[float] = self.seconds or [
            index / self.fps for index in self.indices or range(count)
        ]
        if len(times) != count:
            raise InvalidRequestError(
                f"{len(times)} times for {count} frames", field=self.path, reason="VIDEO_TIMESTAMPS"
            )
        return tuple(times)


def read_frame_times(video_url: Fields) -> FrameTimes | None:
    """``timestamps_s`` or ``fps`` beside a video's ``url``; None where it has neither.

    Raises:
        InvalidRequestError: both, or no valid value.
    """
    path = video_url.name("timestamps_s")
    fps, seconds = _fps(video_url), video_url.numbers("timestamps_s")
    if not seconds:
        return FrameTimes(fps) if fps is not None else None
    if fps is not None:
        raise InvalidRequestError("goes not with fps", field=path)
    return FrameTimes(seconds=tuple(seconds), path=path)


def read_media_io(fields: Fields) -> FrameTimes:
    """vLLM's ``media_io_kwargs``, which holds for all videos of a request.

    Frames are never sampled here, so of its fields only ``fps`` and ``frames_indices`` say
    something; those that ask for no sampling or tell of the source video are checked.

    Raises:
        InvalidRequestError: a field has no valid value.
        UnsupportedFeatureError: sampling, other media, unknown fields.
    """
    media = fields.object("media_io_kwargs")
    if media is None:
        return FrameTimes()
    video = media.object("video")
    media.finish()
    if video is None:
        return FrameTimes()
    fps = _fps(video)
    indices = video.numbers("frames_indices")
    video.only("num_frames", -1)
    video.only("do_sample_frames", False)
    video.integer("total_num_frames")
    video.number("duration")
    video.finish()
    path = video.name("frames_indices")
    return FrameTimes(1.0 if fps is None else fps, tuple(indices), path=path)


def _fps(fields: Fields) -> float | None:
    fps = fields.number("fps")
    if fps is not None and not fps > 0:
        raise InvalidRequestError(f"{fps:g} is not above 0", field=fields.name("fps"))
    return fps
