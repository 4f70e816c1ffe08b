"""What runs inside a preprocessing process: decode one image, run the model's own image processor.

Imported before :func:`initialize` has set the thread counts, so nothing heavy at the top.
"""

import os
import resource
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from epd.encoding.image_limits import ImageLimits
from epd.errors import InvalidRequestError
from epd.media import Media, Video
from epd.thread_slices import compute_patiently

if TYPE_CHECKING:
    from multiprocessing.connection import Connection

    import numpy as np

    from epd.engine.families.base import FrameSettings

_SINGLE_THREAD = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")


@dataclass(frozen=True)
class ProcessedImage:
    """What the model's image processor made of one image, by the processor's own names.

    ``arrays["pixel_values"]`` of the Qwen2-VL family: [patches, features per patch] float32.
    ``duration_ns`` covers decoding and processing, measured in the worker.
    """

    arrays: "dict[str, np.ndarray[Any, Any]]"
    duration_ns: int


@dataclass(frozen=True)
class RefusedImage:
    """An InvalidRequestError as data: exceptions with keyword arguments do not survive pickle."""

    message: str
    field: str
    reason: str


@dataclass(frozen=True)
class FailedImage:
    """The image processor failed, which is its fault and not the image's."""

    error: str


Answer = ProcessedImage | RefusedImage | FailedImage


@dataclass(frozen=True)
class Job:
    """What to process: a file or a video, and its path in the request.

    ``draft_size`` is the size (width, height) that the processor resizes an image to, when JPEG
    files may be decoded coarsely; ``frames`` goes with videos.
    """

    media: Media
    field: str
    draft_size: tuple[int, int] | None = None
    frames: "FrameSettings | None" = None


class _Worker:
    """The state of this process: its image processor and the limits."""

    processor: Any
    limits: ImageLimits


def serve(
    pipe: "Connection[Any, Any]", model_folder: Path, limits: ImageLimits, memory_bytes: int
) -> None:
    """The life of the process: ready, then one answer per image, until the pipe is closed."""
    initialize(model_folder, limits, memory_bytes)
    pipe.send(None)
    while True:
        try:
            job: Job = pipe.recv()
        except EOFError:
            return
        answer: Answer
        try:
            answer = process(job)
        except Exception as error:
            answer = FailedImage(repr(error))
        pipe.send(answer)


def initialize(model_folder: Path, limits: ImageLimits, memory_bytes: int) -> None:
    """Loads the image processor; called once per process by the pool.

    ``memory_bytes`` bounds the address space, so a decoder tricked into a huge allocation gets
    MemoryError instead of taking the machine down; 0 sets no bound.
    """
    compute_patiently()
    for name in _SINGLE_THREAD:
        os.environ[name] = "1"
    # The PIL processors need numpy only. Without torch a worker takes 70 MB instead of 340 and
    # starts in a third of the time; transformers treats a None entry as "not installed".
    sys.modules.setdefault("torch", None)  # type: ignore[arg-type]
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")  # it would warn about just that
    from transformers import AutoImageProcessor

    from epd.encoding.image_header import silence_decoders

    silence_decoders()
    load: Any = AutoImageProcessor.from_pretrained
    _Worker.processor = load(model_folder, local_files_only=True)
    _Worker.limits = limits
    if memory_bytes:
        resource.setrlimit(resource.RLIMIT_AS, (memory_bytes, memory_bytes))


def process(job: Job) -> ProcessedImage | RefusedImage:
    """Decodes and processes one image file, or the frames of one video."""
    started_ns = time.perf_counter_ns()
    try:
        if isinstance(job.media, Video):
            assert job.frames is not None
            arrays = _video_arrays(job.media, job.field, job.frames)
        else:
            arrays = _image_arrays(job.media, job.field, job.draft_size)
    except InvalidRequestError as error:
        return RefusedImage(error.message, error.field, error.reason)
    return ProcessedImage(arrays, time.perf_counter_ns() - started_ns)


def _image_arrays(
    data: bytes, field: str, draft_size: tuple[int, int] | None
) -> "dict[str, np.ndarray[Any, Any]]":
    from epd.encoding.image_reader import read_image
    from epd.encoding.jpeg_draft import JpegDraft

    draft = None
    if draft_size is not None:
        draft = JpegDraft(*draft_size, resample=int(_Worker.processor.resample))
    picture = read_image(data, _Worker.limits, field, draft)
    return dict(_Worker.processor(images=[picture], return_tensors="np"))


def _video_arrays(
    video: Video, field: str, settings: "FrameSettings"
) -> "dict[str, np.ndarray[Any, Any]]":
    """One frame at a time: decoded pictures of a whole video would take much memory."""
    from epd.encoding.frame_weaver import FrameWeaver
    from epd.encoding.image_reader import read_image

    weaver = FrameWeaver(len(video.frames), settings.temporal_patch_size)
    resample = settings.options.get("resample", _Worker.processor.resample)
    for index, data in enumerate(video.frames):
        picture = read_image(data, _Worker.limits, f"{field}.frames[{index}]")
        resized = picture.resize(settings.size, resample)
        made = _Worker.processor(images=[resized], return_tensors="np", **settings.options)
        _, height, width = (int(n) for n in made["image_grid_thw"][0])
        weaver.add(made["pixel_values"], height, width)
    return weaver.arrays()
