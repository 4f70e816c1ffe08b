"""How Qwen2-VL's video processor treats frames, told in the words of its image processor.

Both do the same to a picture; what differs is the size a frame is resized to. transformers' own
video processor needs torchvision, which nothing else here does, and resizes with its arithmetic:
pixels of resized frames differ from it by what two bicubic filters differ by, see
docs/operations.md. Frames are never sampled: those given are the video.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import smart_resize

#: Where transformers looks, in its order: file, and key within it.
_FILES = (
    ("processor_config.json", "video_processor"),
    ("video_preprocessor_config.json", None),
    ("preprocessor_config.json", None),
)
_OPTIONS = (
    "resample",
    "do_rescale",
    "rescale_factor",
    "do_normalize",
    "image_mean",
    "image_std",
)


class Qwen2VLVideoSettings:
    """The video processor settings of a model folder."""

    #: Defaults of transformers' Qwen2VLVideoProcessor: least and most pixels of a frame.
    default_pixels = (128 * 28 * 28, 28 * 28 * 768)
    default_max_tokens = 128000

    def __init__(self, folder: Path) -> None:
        config = _video_config(folder)
        #: The image processor's options where videos differ from images.
        self.options = {name: config[name] for name in _OPTIONS if config.get(name) is not None}
        self.temporal_patch_size = int(config.get("temporal_patch_size") or 2)
        self._shortest, self._longest = _pixels(config, self.default_pixels)
        self._capped = bool(config.get("cap_pixels_per_frame"))
        self._max_tokens = int(config.get("max_video_tokens") or self.default_max_tokens)

    def temporal_patches(self, frames: int) -> int:
        """Temporal patches of so many frames; the last frame fills what is missing."""
        return -(-frames // self.temporal_patch_size)

    def frame_size(self, frames: int, height: int, width: int, factor: int) -> tuple[int, int]:
        """Height and width, multiples of ``factor``, that each of so many frames is resized to.

        Raises:
            ValueError: the side ratio is too extreme.
        """
        most = self._longest
        if self._capped:
            total = int(self._max_tokens * factor * factor * 0.9)
            share = total * self.temporal_patch_size // frames
            most = max(min(most, share), int(self._shortest * 1.05))
        size: tuple[int, int] = smart_resize(
            height, width, factor=factor, min_pixels=self._shortest, max_pixels=most
        )
        return size

    def to_dict(self) -> Mapping[str, Any]:
        """All that decides the pixels, for the digest."""
        return vars(self)


def _video_config(folder: Path) -> Mapping[str, Any]:
    for name, key in _FILES:
        path = folder / name
        if path.is_file():
            found = json.loads(path.read_text("utf-8"))
            found = found if key is None else found.get(key)
            if found is not None:
                return dict(found)
    return {}


def _pixels(config: Mapping[str, Any], default: tuple[int, int]) -> tuple[int, int]:
    """Least and most pixels; older files name them so."""
    size = config.get("size") or dict(zip(("shortest_edge", "longest_edge"), default, strict=True))
    shortest = config.get("min_pixels") or size["shortest_edge"]
    longest = config.get("max_pixels") or size["longest_edge"]
    return int(shortest), int(longest)
