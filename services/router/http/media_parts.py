"""Images and videos in a message's content."""

import base64

from epd.errors import InvalidRequestError, UnsupportedFeatureError
from epd.media import Video
from services.router.calls import ImagePart, ImageUrlPart, VideoPart
from services.router.http.fields import Fields
from services.router.http.frame_times import FrameTimes, read_frame_times

_FRAMES = "data:video/jpeg;base64,"


def read_image(part: Fields) -> ImagePart | ImageUrlPart:
    """The part's image: a file, or where there is one.

    Raises:
        InvalidRequestError: there is none, or it is malformed.
        UnsupportedFeatureError: a field, or a value of one, that is not supported.
    """
    fields = _required(part, "image_url")
    url = fields.required_text("url")
    # The model sees every image as its processor makes it: there is no low detail.
    fields.only("detail", "auto", "high")
    fields.finish()
    if not url.startswith("data:"):
        return ImageUrlPart(url, fields.name("url"))
    head, _, payload = url.partition(",")
    if not head.startswith("data:image/") or not head.endswith(";base64"):
        raise InvalidRequestError("expected data:image/...;base64,", field=fields.name("url"))
    return ImagePart(_decoded(payload, fields.name("url")))


def read_video(part: Fields, default: FrameTimes, max_frames: int) -> VideoPart:
    """The part's video, as vLLM takes frames: a data URL with an image file after each comma.

    Args:
        part: The part.
        default: When frames are shown, for a part that does not say so.
        max_frames: More are not even decoded.

    Raises:
        InvalidRequestError: there is none, or it is malformed.
        UnsupportedFeatureError: a container format, a URL to download, an unknown field.
    """
    fields = _required(part, "video_url")
    path = fields.name("url")
    url = fields.required_text("url")
    times = read_frame_times(fields) or default
    fields.finish()
    if not url.startswith(_FRAMES):
        raise UnsupportedFeatureError(
            f"videos are taken as their frames only: {_FRAMES} and an image file in base64 for "
            "each, with commas between them",
            reason="VIDEO_FORMAT_UNSUPPORTED",
            metadata={"field": path},
        )
    count = url.count(",", len(_FRAMES)) + 1
    if count > max_frames:
        raise InvalidRequestError(
            f"{count} frames, at most {max_frames} are allowed", field=path, reason="VIDEO_FRAMES"
        )
    frames = tuple(_decoded(payload, path) for payload in url[len(_FRAMES) :].split(","))
    return VideoPart(Video(frames, times.of(count)), part.name("video_url"))


def _required(part: Fields, name: str) -> Fields:
    fields = part.object(name)
    if fields is None:
        raise InvalidRequestError("missing", field=part.name(name), reason="MISSING_FIELD")
    return fields


def _decoded(payload: str, path: str) -> bytes:
    try:
        return base64.b64decode(payload, validate=True)
    except ValueError as error:  # of characters beyond ASCII no binascii.Error
        raise InvalidRequestError("not valid base64", field=path) from error
