"""About how many pixels an image file has, from its first bytes, without a decoder.

For estimates of work only: nothing is checked, and whoever decodes the file looks for itself.
"""

import struct

from epd.encoding.webp_header import read_webp_header

_JPEG_START = b"\xff\xd8"
#: Start-of-frame markers; the gaps are tables.
_JPEG_FRAMES = frozenset(range(0xC0, 0xD0)) - {0xC4, 0xC8, 0xCC}
_JPEG_BARE = frozenset({0x01, *range(0xD0, 0xD9)})


def estimated_pixels(data: bytes) -> int:
    """Width times height of a PNG, JPEG, WebP, GIF or BMP file; of any other the file's length."""
    try:
        width, height = _size(data)
    except (struct.error, ValueError, IndexError):
        return max(1, len(data))
    return max(1, abs(width * height))


def _size(data: bytes) -> tuple[int, int]:
    if data.startswith(b"\x89PNG"):
        return struct.unpack_from(">II", data, 16)
    if data.startswith(b"GIF8"):
        return struct.unpack_from("<HH", data, 6)
    if data.startswith(b"BM"):
        return struct.unpack_from("<ii", data, 18)
    if data.startswith(b"RIFF"):
        header = read_webp_header(data)
        return header.width, header.height
    if data.startswith(_JPEG_START):
        return _jpeg_size(data)
    raise ValueError("no format known here")


def _jpeg_size(data: bytes) -> tuple[int, int]:
    position = len(_JPEG_START)
    while True:
        if data[position] != 0xFF:
            raise ValueError("no marker")
        marker = data[position + 1]
        if marker in _JPEG_FRAMES:
            height, width = struct.unpack_from(">HH", data, position + 5)
            return width, height
        if marker == 0xFF or marker in _JPEG_BARE:
            position += 1 if marker == 0xFF else 2
        else:
            position += 2 + max(2, int.from_bytes(data[position + 2 : position + 4]))
