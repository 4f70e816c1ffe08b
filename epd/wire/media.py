"""Videos on the wire. Free of engine and data plane, so every service can use it."""

from epd.media import Media, Video
from epd.v1 import common_pb2


def video_from_proto(message: common_pb2.Video) -> Video:
    """The video of a wire message; :meth:`Video.check` judges it."""
    return Video(tuple(message.frames), tuple(message.timestamps_s))


def video_to_proto(media: Media) -> common_pb2.Video | None:
    """The wire form of a video; None for an image, which travels as plain bytes."""
    if not isinstance(media, Video):
        return None
    return common_pb2.Video(frames=media.frames, timestamps_s=media.timestamps_s)
