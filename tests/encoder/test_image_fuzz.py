"""Mutated image files: every one is read or refused, and no process dies of it."""

import os
import random
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from epd.encoding.image_header import read_header
from epd.encoding.image_limits import ImageLimits
from epd.encoding.preprocess import PreprocessPool
from epd.encoding.preprocess_config import PreprocessConfig
from epd.errors import InvalidRequestError
from tests.encoder.pictures import encoded, exif, picture, png_bomb

COUNT = 20_000 if os.environ.get("EPD_TEST_FULL") == "1" else 400
FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "TIFF", "BMP")
HEADER_BYTES = 64
EXTREMES = (b"\xff\xff\xff\xff", b"\x00\x00\x00\x00", b"\x7f\xff\xff\xff", b"\x00\x00\xff\x7f")

SEEDS = [
    *(encoded(picture(40, 30), format) for format in FORMATS),
    *(encoded(picture(40, 30).quantize(8), format) for format in ("PNG", "GIF", "TIFF", "BMP")),
    *(encoded(picture(40, 30), format, exif=exif(6)) for format in ("PNG", "JPEG", "WEBP")),
    *(
        encoded(picture(40, 30), "TIFF", compression=compression)
        for compression in ("tiff_lzw", "tiff_adobe_deflate", "jpeg", "packbits")
    ),
    encoded(picture(40, 30), "WEBP", lossless=True),
    encoded(picture(40, 30), "JPEG", progressive=True),
    encoded(picture(40, 30).convert("CMYK"), "JPEG"),
    encoded(picture(40, 30), "GIF", save_all=True, append_images=[picture(40, 30, 1)]),
    png_bomb(),
]


def mutated(generator: random.Random) -> bytes:
    """A seed file with some bytes changed (in its header more often), cut, doubled or inserted."""
    data = bytearray(generator.choice(SEEDS))
    for _ in range(generator.randint(1, 6)):
        end = HEADER_BYTES if generator.random() < 0.6 else len(data)
        position = generator.randrange(max(1, min(end, len(data))))
        match generator.randrange(6):
            case 0:
                data[position : position + 1] = bytes([generator.randrange(256)])
            case 1:
                data[position : position + 4] = generator.choice(EXTREMES)
            case 2:
                del data[position:]
            case 3:
                del data[position : position + generator.randint(1, 8)]
            case 4:
                data[position:position] = generator.randbytes(generator.randint(1, 8))
            case 5:
                data[position:position] = data[position : position + generator.randint(1, 64)]
        if not data:
            break
    return bytes(data)


def files(seed: int, count: int) -> Iterator[bytes]:
    generator = random.Random(seed)
    return (mutated(generator) for _ in range(count))


@pytest.mark.filterwarnings("ignore")  # Pillow has something to say about most of these files
def test_headers_of_mutated_files_are_read_or_refused_quickly() -> None:
    limits = ImageLimits()
    slowest_s = 0.0
    for data in files(1, COUNT * 5):
        started = time.thread_time()  # what it computes, however busy the machine is
        try:
            header = read_header(data, limits, "images[0]")
        except InvalidRequestError as error:
            assert error.field == "images[0]"  # noqa: PT017
        else:
            assert header.width * header.height <= limits.max_pixels
        slowest_s = max(slowest_s, time.thread_time() - started)
    assert slowest_s < 2.0


@pytest.mark.timeout(3000 if COUNT > 1000 else 120)
async def test_mutated_files_kill_no_process_and_leak_nothing(model_folder: Path) -> None:
    pool = PreprocessPool(PreprocessConfig(model_folder, timeout_s=20))
    await pool.start()
    read = refused = 0
    try:
        worker = next(
            one for one in psutil.Process().children() if "spawn_main" in " ".join(one.cmdline())
        )
        settled_bytes = 0
        for n, data in enumerate(files(2, COUNT)):
            try:
                await pool.process(data, "images[0]")
                read += 1
            except InvalidRequestError:
                refused += 1
            if n == COUNT // 4:
                settled_bytes = worker.memory_info().rss
        assert pool.restarts == 0
        assert worker.is_running()
        assert worker.memory_info().rss < settled_bytes + 64 * 1024**2
    finally:
        await pool.stop()
    assert read > COUNT // 20
    assert refused > COUNT // 4
