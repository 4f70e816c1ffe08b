"""The content digest of an image or video: what embedding cache and block hashes know it by."""

import struct

from blake3 import blake3

from epd.media import Media, Video

DIGEST_BYTES = 32


def image_digest(model_digest: str, processor_digest: str, data: bytes) -> bytes:
    """BLAKE3-256 over model, image-processor settings and file bytes, 32 bytes long.

    Every part is preceded by its length (8 bytes, little endian), so that no two different triples
    are the same byte sequence. Equal digests mean: the same embedding.

    Args:
        model_digest: Of configuration and weights, as ``GetInfo`` tells it.
        processor_digest: Of the image processor's settings, as ``GetInfo`` tells it.
        data: The image file as the client sent it.
    """
    return _framed(model_digest.encode(), processor_digest.encode(), data)


def video_digest(model_digest: str, processor_digest: str, video: Video) -> bytes:
    """The same over the word "video", both digests, the timestamps and every frame's file.

    The timestamps are one part of doubles, little endian: their number is that of the frames.
    """
    times = struct.pack(f"<{len(video.timestamps_s)}d", *video.timestamps_s)
    return _framed(b"video", model_digest.encode(), processor_digest.encode(), times, *video.frames)


def media_digest(model_digest: str, processor_digest: str, media: Media) -> bytes:
    """:func:`image_digest` or :func:`video_digest`."""
    if isinstance(media, Video):
        return video_digest(model_digest, processor_digest, media)
    return image_digest(model_digest, processor_digest, media)


def _framed(*parts: bytes) -> bytes:
    digest = blake3()
    for part in parts:
        digest.update(len(part).to_bytes(8, "little"))
        digest.update(part)
    return digest.digest()
