"""Image files for tests: every readable format, the odd kinds, and the broken ones."""

import io
import struct
import zlib

import numpy as np
from PIL import Image


def picture(width: int = 61, height: int = 47, seed: int = 0) -> Image.Image:
    """A smooth picture with noise, so that a turned or swapped copy differs everywhere."""
    generator = np.random.default_rng(seed)
    x, y = np.meshgrid(np.linspace(0, 200, width), np.linspace(0, 200, height))
    pixels = np.stack([x, y, (x + y) / 2], axis=-1) + generator.integers(0, 50, (height, width, 3))
    return Image.fromarray(pixels.astype(np.uint8))


def encoded(image: Image.Image, format: str, **options: object) -> bytes:
    """The picture as a file."""
    buffer = io.BytesIO()
    image.save(buffer, format=format, **options)
    return buffer.getvalue()


def png_chunk(kind: bytes, body: bytes) -> bytes:
    """One PNG chunk with its checksum."""
    checksum = zlib.crc32(kind + body)
    return struct.pack(">I", len(body)) + kind + body + struct.pack(">I", checksum)


def png_bomb(width: int = 60_000, height: int = 60_000) -> bytes:
    """A few bytes that announce gigabytes of pixels."""
    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return (
        b"\x89PNG\r\n\x1a\n"
        + png_chunk(b"IHDR", header)
        + png_chunk(b"IDAT", zlib.compress(bytes(1000)))
        + png_chunk(b"IEND", b"")
    )


def exif(orientation: int) -> bytes:
    """An EXIF block with just the orientation."""
    block = Image.Exif()
    block[0x0112] = orientation
    return block.tobytes()
