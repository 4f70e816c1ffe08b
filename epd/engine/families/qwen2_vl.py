"""Qwen2-VL: images of any size and videos, multimodal rope over time, height and width."""

import contextlib
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from blake3 import blake3
from PIL.Image import Image
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import (
    Qwen2VLImageProcessorPil,
    smart_resize,
)
from transformers.models.qwen2_vl.modeling_qwen2_vl import (
    Qwen2VisionTransformerPretrainedModel,
    Qwen2VLTextModel,
)

from epd.engine.attention import register_attention
from epd.engine.families.base import (
    FrameSettings,
    Grid,
    ImagePlan,
    LanguageModules,
    ModelFamily,
    PixelInput,
)
from epd.engine.families.qwen2_vl_video import Qwen2VLVideoSettings
from epd.engine.loading import WeightFiles
from epd.engine.requests import PromptImage
from epd.errors import InvalidRequestError

# Folders from the hub use the short prefixes, folders saved by some transformers versions the long.
LANGUAGE_PREFIXES = ("model.language_model.", "model.")
VISION_PREFIXES = ("model.visual.", "visual.")
#: Far beyond any context; keeps a made-up grid from taking memory.
MAX_IMAGE_TOKENS = 1 << 20


class Qwen2VLVision(torch.nn.Module):
    """Vision tower and merger with plain tensors at both ends."""

    def __init__(self, tower: Qwen2VisionTransformerPretrainedModel) -> None:
        super().__init__()
        self.tower = tower

    def forward(self, patches: torch.Tensor, grids: torch.Tensor) -> torch.Tensor:
        embeddings: torch.Tensor = self.tower(patches, grid_thw=grids).pooler_output
        return embeddings


class Qwen2VLFamily(ModelFamily):
    """``Qwen2VLForConditionalGeneration`` folders."""

    name = "qwen2_vl"
    position_axes = 3
    #: transformers' classes, and what gives the vision tower plain tensors at both ends.
    text_class: Any = Qwen2VLTextModel
    tower_class: Any = Qwen2VisionTransformerPretrainedModel
    vision_class: Any = Qwen2VLVision
    video_class: type[Qwen2VLVideoSettings] = Qwen2VLVideoSettings

    def __init__(self, folder: Any, config: Any) -> None:
        super().__init__(folder, config)
        self.embedding_token_id = int(config.image_token_id)
        video = config.video_token_id
        # Every configuration names one; a folder whose vocabulary ends before it has no videos.
        if video is not None and 0 <= video < self.vocab_size and video != config.image_token_id:
            self.video_token_id = int(video)
        self._merge_size = int(config.vision_config.spatial_merge_size)

    def positions(
        self,
        token_ids: Sequence[int],
        images: Sequence[PromptImage],
        position_delta: int,
        start: int,
        end: int,
    ) -> npt.NDArray[np.int64]:
        if not images or start >= images[-1].offset + images[-1].length:
            return np.repeat(np.arange(start, end)[None] + position_delta, 3, axis=0)
        return self._positions_among(self._segments(token_ids, images, end), start, end)

    def _segments(
        self, token_ids: Sequence[int], images: Sequence[PromptImage], end: int
    ) -> Iterable[PromptImage]:
        """The runs of rows before ``end`` that have positions of their own, in order."""
        return images

    def _positions_among(
        self, segments: Iterable[PromptImage], start: int, end: int
    ) -> npt.NDArray[np.int64]:
        positions = np.repeat(np.arange(start, end)[None], 3, axis=0)
        delta = 0
        for image in segments:
            if image.offset >= end:
                break
            assert image.grid is not None, "rope positions of an image need its grid"
            stop = image.offset + image.length
            low, high = max(image.offset, start), min(stop, end)
            if low < high:
                inside = self._image_positions(image.grid)[
                    :, low - image.offset : high - image.offset
                ]
                positions[:, low - start : high - start] = image.offset + delta + inside
            # Text goes on from the longer side of an image, and of a video's frames: as in
            # transformers, a video's time does not count here, however long it is.
            step = self.plan_image(image.grid).position_delta
            positions[:, max(stop - start, 0) :] += step
            delta += step
        return positions

    def _image_positions(self, grid: Grid) -> npt.NDArray[np.int64]:
        """[3, tokens] from the image's first position on, in raster order after merging."""
        temporal, height, width = grid
        shape = (temporal, height // self._merge_size, width // self._merge_size)
        return np.indices(shape, dtype=np.int64).reshape(3, -1)

    def plan_image(self, grid: Grid) -> ImagePlan:
        assert self.embedding_token_id is not None
        return self._plan(grid, self.embedding_token_id)

    def plan_video(self, grid: Grid) -> ImagePlan:
        if self.video_token_id is None:
            raise self._no_videos()
        return self._plan(grid, self.video_token_id)

    def _plan(self, grid: Grid, token_id: int) -> ImagePlan:
        temporal, height, width = grid
        tokens = temporal * height * width // self._merge_size**2
        if min(grid) < 1 or height % self._merge_size or width % self._merge_size:
            raise InvalidRequestError(
                f"no image has a grid of {grid}: sides are multiples of {self._merge_size}",
                field="images",
            )
        if tokens > MAX_IMAGE_TOKENS:
            raise InvalidRequestError(
                f"an image of grid {grid} has {tokens} tokens, at most {MAX_IMAGE_TOKENS} fit",
                field="images",
            )
        return ImagePlan(
            grid=grid,
            anchor_token_id=token_id,
            placeholder_ids=(token_id,) * tokens,
            position_delta=max(height, width) // self._merge_size - tokens,
            embedding_tokens=tokens,
        )

    def plan_from_size(self, width: int, height: int) -> ImagePlan:
        size = self._processor.size
        with _extreme_sides_refused(width, height):
            resized = smart_resize(
                height,
                width,
                factor=self._factor,
                min_pixels=size["shortest_edge"],
                max_pixels=size["longest_edge"],
            )
        return self.plan_image(self._grid(1, *resized))

    def plan_video_from_size(
        self, timestamps_s: Sequence[float], width: int, height: int
    ) -> ImagePlan:
        return self.plan_video(self._video_grid(len(timestamps_s), width, height))

    def _video_grid(self, frames: int, width: int, height: int) -> Grid:
        """The patch grid of a video of so many frames of this size.

        Raises:
            UnsupportedFeatureError, InvalidRequestError: as for plan_video_from_size.
        """
        if self.video_token_id is None:
            raise self._no_videos()
        with _extreme_sides_refused(width, height):
            resized = self._video.frame_size(frames, height, width, self._factor)
        return self._grid(self._video.temporal_patches(frames), *resized)

    def frame_settings(self, grid: Grid) -> FrameSettings:
        if self.video_token_id is None:
            raise self._no_videos()
        options = {**self._video.options, "do_resize": False}
        return FrameSettings(self.pixel_size(grid), options, self._video.temporal_patch_size)

    @property
    def _factor(self) -> int:
        """Sides of a resized picture are multiples of it."""
        return int(self._processor.patch_size * self._processor.merge_size)

    def _grid(self, temporal: int, height: int, width: int) -> Grid:
        side = self._processor.patch_size
        return temporal, height // side, width // side

    def pixel_size(self, grid: Grid) -> tuple[int, int]:
        side = self._processor.patch_size
        return grid[2] * side, grid[1] * side

    def pixel_input(self, processed: Mapping[str, npt.NDArray[Any]]) -> PixelInput:
        temporal, height, width = (int(n) for n in processed["image_grid_thw"][0])
        return PixelInput(processed["pixel_values"], (temporal, height, width))

    def preprocess(self, image: Image) -> PixelInput:
        return self.pixel_input(self._processor([image], return_tensors="np"))

    @property
    def processor_digest(self) -> str:
        both = [self._processor.to_dict(), self._video.to_dict()]
        settings = json.dumps(both, sort_keys=True, default=str)
        return blake3(f"{self.name}\n{settings}".encode()).hexdigest()

    @cached_property
    def _video(self) -> Qwen2VLVideoSettings:
        return self.video_class(self.folder)

    @cached_property
    def _processor(self) -> Qwen2VLImageProcessorPil:
        return Qwen2VLImageProcessorPil.from_pretrained(self.folder, local_files_only=True)

    def load_language(self, dtype: torch.dtype, device: torch.device) -> LanguageModules:
        config = self.text_config
        config._attn_implementation = register_attention()
        weights = WeightFiles(self.folder, dtype, device)
        prefix = weights.present_prefix(LANGUAGE_PREFIXES, "embed_tokens.weight")
        body = weights.load(lambda: self.text_class(config), prefix)
        tied = body.embed_tokens.weight if self.config.tie_word_embeddings else None
        return LanguageModules(body.embed_tokens, body, weights.load_head("lm_head.weight", tied))

    def load_vision(self, dtype: torch.dtype, device: torch.device) -> torch.nn.Module:
        config = self.config.vision_config
        config._attn_implementation = "sdpa"
        weights = WeightFiles(self.folder, dtype, device)
        prefix = weights.present_prefix(VISION_PREFIXES, "patch_embed.proj.weight")
        vision: torch.nn.Module = self.vision_class(
            weights.load(lambda: self.tower_class(config), prefix)
        )
        return vision


@contextlib.contextmanager
def _extreme_sides_refused(width: int, height: int) -> Iterator[None]:
    """What transformers says of a picture of this size, as an InvalidRequestError."""
    try:
        yield
    except ValueError as error:
        raise InvalidRequestError(
            f"an image of {width}x{height} pixels has too extreme a side ratio",
            field="image",
            reason="IMAGE_SHAPE",
        ) from error
