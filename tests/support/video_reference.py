"""transformers' video processors without torchvision, which they cannot be used without.

``patchify`` is their code, the same for Qwen2-VL and Qwen3-VL. Resizing is the PIL
image processor's; ``tests/encoder/test_video.py`` compares all of Qwen2-VL's with arrays that the
real one has made.
"""

import io
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from PIL import Image
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import (
    Qwen2VLImageProcessorPil,
    smart_resize,
)
from transformers.models.qwen3_vl.processing_qwen3_vl import Qwen3VLProcessor
from transformers.models.qwen3_vl.video_processing_qwen3_vl import (
    smart_resize as smart_resize_video,
)

from epd.media import Video


def process_video(
    processor: Qwen2VLImageProcessorPil, frames: Sequence[bytes], *, bounded_together: bool = False
) -> tuple[torch.Tensor, tuple[int, int, int]]:
    """``pixel_values_videos`` and ``video_grid_thw`` of one video.

    ``bounded_together``: as Qwen3-VL does it, pixels of all frames are bounded together.
    """
    pictures = [Image.open(io.BytesIO(data)).convert("RGB") for data in frames]
    width, height = pictures[0].size
    bounds = {
        "factor": processor.patch_size * processor.merge_size,
        "min_pixels": processor.size["shortest_edge"],
        "max_pixels": processor.size["longest_edge"],
    }
    if bounded_together:
        rows, columns = smart_resize_video(len(frames), height, width, **bounds)
    else:
        rows, columns = smart_resize(height, width, **bounds)
    resized = [picture.resize((columns, rows), Image.Resampling.BICUBIC) for picture in pictures]
    video = np.stack([np.asarray(picture, np.float32) for picture in resized]) / 255
    video = (video - np.array(processor.image_mean)) / np.array(processor.image_std)
    pixels = torch.from_numpy(video.astype(np.float32)).permute(0, 3, 1, 2)[None]
    return patchify(
        pixels, processor.patch_size, processor.merge_size, processor.temporal_patch_size
    )


def patchify(
    videos: torch.Tensor, patch_size: int, merge_size: int, temporal_patch_size: int
) -> tuple[torch.Tensor, tuple[int, int, int]]:
    """``Qwen2VLVideoProcessor.patchify`` of transformers 5.24."""
    _, num_frames, channel, resized_height, resized_width = videos.shape
    if pad := -num_frames % temporal_patch_size:
        repeats = videos[:, -1:].expand(-1, pad, -1, -1, -1)
        videos = torch.cat((videos, repeats), dim=1)
        num_frames += pad
    grid_t = num_frames // temporal_patch_size
    grid_h, grid_w = resized_height // patch_size, resized_width // patch_size
    patches = videos.reshape(
        1,
        grid_t,
        temporal_patch_size,
        channel,
        grid_h // merge_size,
        merge_size,
        patch_size,
        grid_w // merge_size,
        merge_size,
        patch_size,
    )
    patches = patches.permute(0, 1, 4, 7, 5, 8, 3, 2, 6, 9)
    flat = patches.reshape(
        grid_t * grid_h * grid_w, channel * temporal_patch_size * patch_size * patch_size
    )
    return flat, (grid_t, grid_h, grid_w)


def spelled_video(video: Video, grid: tuple[int, int, int]) -> str:
    """What ``Qwen3VLProcessor`` of transformers 5.24 puts in the place of a video's token.

    Args:
        video: Its frames are the same time apart.
        grid: ``video_grid_thw``.
    """
    times = video.timestamps_s
    fps = 1 / (times[1] - times[0])
    metadata = SimpleNamespace(fps=fps, frames_indices=[round(time * fps) for time in times])
    processor: Any = SimpleNamespace(
        video_processor=SimpleNamespace(merge_size=2, temporal_patch_size=2),
        vision_start_token="<|vision_start|>",
        vision_end_token="<|vision_end|>",
        video_token="<|video_pad|>",
    )
    processor._calculate_timestamps = Qwen3VLProcessor._calculate_timestamps.__get__(processor)
    inputs = {"video_grid_thw": torch.tensor([grid]), "video_metadata": [metadata]}
    text: str = Qwen3VLProcessor.replace_video_token(processor, inputs, 0)
    return text
