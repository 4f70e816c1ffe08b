"""Size and metadata of a WebP file, read from its RIFF chunks.

Pillow starts libwebp's decoder when it opens such a file, and that allocates the whole canvas. Here
the size is known before.
"""

import struct
from typing import NamedTuple


class WebpHeader(NamedTuple):
    """Canvas size in pixels; the bodies of the EXIF and XMP chunks, None when there are none."""

    width: int
    height: int
    exif: bytes | None
    xmp: bytes | None


def read_webp_header(data: bytes) -> WebpHeader:
    """Walks the chunk list without touching pixel data.

    Raises:
        ValueError: the file does not begin as a WebP file must.
    """
    if len(data) < 30 or data[:4] != b"RIFF" or data[8:12] != b"WEBP":
        raise ValueError("no WebP header")
    width, height = _canvas_size(data)
    exif = xmp = None
    position = 12
    while position + 8 <= len(data):
        kind, length = struct.unpack_from("<4sI", data, position)
        body = data[position + 8 : position + 8 + length] if kind in (b"EXIF", b"XMP ") else b""
        if kind == b"EXIF" and exif is None:
            exif = body
        elif kind == b"XMP " and xmp is None:
            xmp = body
        position += 8 + length + (length & 1)
    return WebpHeader(width, height, exif, xmp)


def _canvas_size(data: bytes) -> tuple[int, int]:
    kind = data[12:16]
    if kind == b"VP8X":  # two 24-bit fields, each one less than the side
        return (
            int.from_bytes(data[24:27], "little") + 1,
            int.from_bytes(data[27:30], "little") + 1,
        )
    if kind == b"VP8L" and data[20] == 0x2F:  # two 14-bit fields, each one less than the side
        bits = int.from_bytes(data[21:25], "little")
        return (bits & 0x3FFF) + 1, (bits >> 14 & 0x3FFF) + 1
    if kind == b"VP8 " and data[23:26] == b"\x9d\x01\x2a":
        width, height = struct.unpack_from("<HH", data, 26)
        return width & 0x3FFF, height & 0x3FFF
    raise ValueError("no WebP image chunk")
