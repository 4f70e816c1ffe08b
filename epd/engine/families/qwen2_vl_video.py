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

from epd.engine.families.base import FrameSettings

# Defaults of transformers' Qwen2VLVideoProcessor.
_SIZE = {"shortest_edge": 128 * 28 * 28, "longest_edge": 28 * 28 * 768}
_MAX_VIDEO_TOKENS = 128000
#: Where transformers looks, in its order: file, and key within it.
_FILES = (
    ("processor_config.json", "video_processor"),
    ("video_preprocessor_config.json", None),
    ("preprocessor_config.json", None),
)
_OPTIONS = (
    "do_resize",
    "resample",
    "do_rescale",
    "rescale_factor",
    "do_normalize",
    "image_mean",
    "image_std",
)


class Qwen2VLVideoSettings:
    """The video processor settings of a model folder."""

    def __init__(self, folder: Path) -> None:
        config = _video_config(folder)
        self._options = {name: config[name] for name in _OPTIONS if config.get(name) is not None}
        self._shortest, self._longest = _sizes(config)
        self._temporal_patch_size = int(config.get("temporal_patch_size") or 2)
        self._capped = bool(config.get("cap_pixels_per_frame"))
        self._max_tokens = int(config.get("max_video_tokens") or _MAX_VIDEO_TOKENS)

    def temporal_patches(self, frames: int) -> int:
        """Temporal patches of so many frames; the last frame fills what is missing."""
        return -(-frames // self._temporal_patch_size)

    def pixels(self, frames: int, factor: int) -> tuple[int, int]:
        """Least and most pixels of a frame, of sides that are multiples of ``factor``."""
        if not self._capped:
            return self._shortest, self._longest
        total = int(self._max_tokens * factor * factor * 0.9)
        share = total * self._temporal_patch_size // frames
        return self._shortest, max(min(self._longest, share), int(self._shortest * 1.05))

    def frame_settings(self, frames: int, factor: int) -> FrameSettings:
        """For the image processor."""
        shortest, longest = self.pixels(frames, factor)
        size = {"shortest_edge": shortest, "longest_edge": longest}
        return FrameSettings({**self._options, "size": size}, self._temporal_patch_size)

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


def _sizes(config: Mapping[str, Any]) -> tuple[int, int]:
    """Least and most pixels; older files name them so."""
    size = {**(config.get("size") or _SIZE)}
    shortest = config.get("min_pixels") or size["shortest_edge"]
    longest = config.get("max_pixels") or size["longest_edge"]
    return int(shortest), int(longest)
