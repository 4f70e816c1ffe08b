import asyncio
import contextlib
import io
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import numpy as np
import psutil
import pytest
from PIL import Image, ImageOps
from transformers import AutoImageProcessor

from epd.encoding import preprocess_lane
from epd.encoding.image_limits import ImageLimits
from epd.encoding.preprocess import PreprocessPool
from epd.encoding.preprocess_config import PreprocessConfig
from epd.encoding.preprocess_worker import Job
from epd.errors import DeadlineExceededError, InternalError, InvalidRequestError, UnavailableError
from tests.encoder.pictures import encoded, exif, picture, png_bomb

FILES = {
    format: encoded(picture(130, 97), format)
    for format in ("PNG", "JPEG", "WEBP", "GIF", "TIFF", "BMP")
} | {
    "turned": encoded(picture(130, 97), "JPEG", exif=exif(6)),
    "cmyk": encoded(picture(130, 97).convert("CMYK"), "JPEG"),
    "palette": encoded(picture(130, 97).quantize(16), "PNG"),
    "1x1": encoded(picture(1, 1), "PNG"),
    "extreme side ratio": encoded(picture(2, 390), "PNG"),
    "large": encoded(picture(900, 700), "JPEG"),
}


@pytest.fixture
async def pool(model_folder: Path) -> AsyncIterator[PreprocessPool]:
    pool = PreprocessPool(PreprocessConfig(model_folder))
    await pool.start()
    yield pool
    await pool.stop()


def worker_processes() -> list[psutil.Process]:
    found = []
    for child in psutil.Process().children():
        with contextlib.suppress(psutil.NoSuchProcess):  # gone meanwhile, or a zombie
            if "spawn_main" in " ".join(child.cmdline()):
                found.append(child)
    return found


async def test_pixels_equal_the_plain_processor(pool: PreprocessPool, model_folder: Path) -> None:
    processor = AutoImageProcessor.from_pretrained(model_folder)
    for name, data in FILES.items():
        image = ImageOps.exif_transpose(Image.open(io.BytesIO(data))).convert("RGB")
        expected = processor(images=[image], return_tensors="np")
        processed = await pool.process(data, "images[0]")
        assert processed.arrays.keys() == expected.keys(), name
        for key in expected:
            assert processed.arrays[key].dtype == expected[key].dtype
            assert np.array_equal(processed.arrays[key], expected[key]), (name, key)
        assert processed.duration_ns > 0


async def test_bad_files_are_refused_and_the_process_goes_on(pool: PreprocessPool) -> None:
    workers = worker_processes()
    for data in (b"", b"nonsense", png_bomb(), FILES["PNG"][:-400]):
        with pytest.raises(InvalidRequestError, match=r"images\[7\]") as caught:
            await pool.process(data, "images[7]")
        assert caught.value.field == "images[7]"
    await pool.process(FILES["PNG"], "images[0]")
    assert worker_processes() == workers
    assert pool.restarts == 0


async def test_worker_is_single_threaded_and_without_torch(pool: PreprocessPool) -> None:
    await pool.process(FILES["JPEG"], "images[0]")
    (worker,) = worker_processes()
    assert worker.memory_info().rss < 150 * 1024**2
    assert not any("libtorch" in mapping.path for mapping in worker.memory_maps())
    assert worker.num_threads() == 1


async def test_crash_fails_only_its_image_and_the_process_is_replaced(model_folder: Path) -> None:
    pool = PreprocessPool(PreprocessConfig(model_folder, processes=2))
    await pool.start()
    try:
        doomed, _ = worker_processes()
        doomed.send_signal(signal.SIGSTOP)  # has its image until it is killed
        images = {
            asyncio.create_task(pool.process(FILES["large"], f"images[{n}]")): n for n in range(2)
        }
        done, left = await asyncio.wait(images, return_when=asyncio.FIRST_COMPLETED)
        (other,), (victim,) = done, left
        assert (await other).arrays
        doomed.send_signal(signal.SIGKILL)
        with pytest.raises(InternalError, match=rf"crashed on images\[{images[victim]}\]"):
            await victim
        for _ in range(4):
            await pool.process(FILES["PNG"], "images[0]")
        assert pool.restarts == 1
    finally:
        await pool.stop()


async def test_hung_process_is_killed_after_the_timeout(model_folder: Path) -> None:
    pool = PreprocessPool(PreprocessConfig(model_folder, timeout_s=3.0))
    await pool.start()
    try:
        (worker,) = worker_processes()
        worker.send_signal(signal.SIGSTOP)
        with pytest.raises(DeadlineExceededError, match=r"longer than 3 s"):
            await pool.process(FILES["PNG"], "images[0]")
        # The next one must not meet that timeout for a machine that stands still for a moment.
        pool._lanes[0]._config = PreprocessConfig(model_folder)
        assert (await pool.process(FILES["PNG"], "images[0]")).arrays
    finally:
        await pool.stop()


@pytest.mark.parametrize("moment_s", [0.0, 0.02, 0.05])
async def test_stop_in_the_middle_of_an_answer_ends(model_folder: Path, moment_s: float) -> None:
    """An answer of 2.4 MB does not fit into the pipe, so the process dies while it writes it."""
    pool = PreprocessPool(PreprocessConfig(model_folder))
    await pool.start()
    jobs = [asyncio.create_task(pool.process(FILES["large"], "images[0]")) for _ in range(50)]
    await asyncio.wait(jobs, return_when=asyncio.FIRST_COMPLETED)
    await asyncio.sleep(moment_s)
    async with asyncio.timeout(60):
        await pool.stop()
        ends = await asyncio.gather(*jobs, return_exceptions=True)
    assert any(isinstance(end, UnavailableError | asyncio.CancelledError) for end in ends)
    assert worker_processes() == []


async def test_death_in_the_middle_of_an_answer_ends_the_wait_for_its_rest(
    model_folder: Path,
) -> None:
    process = preprocess_lane._Process(PreprocessConfig(model_folder))
    await process.greeting()
    process._pipe.send(Job(FILES["large"], "images[0]"))
    async with asyncio.timeout(60):
        while not process._pipe.poll():
            await asyncio.sleep(0.01)
        process._process.kill()  # nobody has read yet, and the pipe does not hold all of it
        with pytest.raises(preprocess_lane.LaneBrokenError):
            await process.greeting()
    process.kill()
    process.join()


async def test_cancelled_caller_leaves_at_once_and_frees_its_process(pool: PreprocessPool) -> None:
    (worker,) = worker_processes()
    worker.send_signal(signal.SIGSTOP)  # whoever waited for the image would wait for the timeout
    job = asyncio.create_task(pool.process(FILES["large"], "images[0]"))
    await asyncio.sleep(0.1)
    job.cancel()
    async with asyncio.timeout(20):  # the timeout is 30 s
        with pytest.raises(asyncio.CancelledError):
            await job
    worker.send_signal(signal.SIGCONT)
    assert (await pool.process(FILES["PNG"], "images[0]")).arrays
    assert pool.restarts == 0


async def test_huge_allocation_in_a_decoder_is_an_error_not_a_dead_machine(
    model_folder: Path,
) -> None:
    config = PreprocessConfig(model_folder, ImageLimits(), memory_bytes=512 * 1024**2)
    pool = PreprocessPool(config)
    await pool.start()
    try:
        with pytest.raises((InvalidRequestError, InternalError)):
            await pool.process(encoded(Image.new("RGB", (7000, 7000)), "PNG"), "images[0]")
        assert (await pool.process(FILES["PNG"], "images[0]")).arrays
    finally:
        await pool.stop()


def test_worker_processes_end_when_their_service_is_killed(model_folder: Path) -> None:
    script = f"""
import asyncio
from pathlib import Path
from epd.encoding.preprocess import PreprocessPool
from epd.encoding.preprocess_config import PreprocessConfig

async def main():
    await PreprocessPool(PreprocessConfig(Path({str(model_folder)!r}))).start()
    print("up", flush=True)
    await asyncio.sleep(60)

if __name__ == "__main__":
    asyncio.run(main())
"""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    service = subprocess.Popen(
        [sys.executable, "-c", script], stdout=subprocess.PIPE, env=environment
    )
    assert service.stdout is not None
    assert service.stdout.readline() == b"up\n"
    workers = psutil.Process(service.pid).children()
    assert workers
    service.kill()
    service.wait()
    _, alive = psutil.wait_procs(workers, timeout=30)
    assert not alive
