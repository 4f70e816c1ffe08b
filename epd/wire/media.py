"""Images and videos on the wire. Free of engine and data plane, so every service can use it."""

from typing import Any

from epd.media import Media, Video
from epd.v1 import common_pb2, decode_pb2, encoder_pb2


def media_from_proto(message: encoder_pb2.EncodeImage | decode_pb2.LocalImage) -> Media:
    """The file or video of a message that has one of them."""
    return video_from_proto(message.video) if message.HasField("video") else message.data


def media_fields(media: Media) -> dict[str, Any]:
    """The fields ``data`` or ``video`` of such a message."""
    if isinstance(media, Video):
        return {"video": common_pb2.Video(frames=media.frames, timestamps_s=media.timestamps_s)}
    return {"data": media}


def video_from_proto(message: common_pb2.Video) -> Video:
    """The video of a wire message; :meth:`Video.check` judges it."""
    return Video(tuple(message.frames), tuple(message.timestamps_s))
