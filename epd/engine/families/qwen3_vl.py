"""Qwen3-VL: images as Qwen2-VL takes them, videos with their times in the text, DeepStack.

The vision tower's features of several depths go along with an image's embedding, and each depth is
added to the hidden states after one of the first layers. A row of the embedding holds all of them:
the token itself, then level after level, so whatever moves, keeps or checks embeddings needs to
know nothing of levels.

A video is one embedding, too. Its run of placeholders holds a vision segment per temporal patch and
text between them (:mod:`epd.engine.families.qwen3_vl_video`), and each segment has the rope
positions of an image.
"""

from collections.abc import Iterator, Sequence
from functools import cached_property
from typing import Any

import numpy as np
import torch
from transformers.models.qwen3_vl.modeling_qwen3_vl import Qwen3VLTextModel, Qwen3VLVisionModel

from epd.engine.families.base import Grid, ImagePlan
from epd.engine.families.qwen2_vl import Qwen2VLFamily
from epd.engine.families.qwen3_vl_video import Qwen3VLVideoSettings, TimeSpeller
from epd.engine.requests import PromptImage
from epd.errors import InvalidRequestError


class Qwen3VLVision(torch.nn.Module):
    """Vision tower and mergers with plain tensors at both ends."""

    def __init__(self, tower: Qwen3VLVisionModel) -> None:
        super().__init__()
        self.tower = tower

    def forward(self, patches: torch.Tensor, grids: torch.Tensor) -> torch.Tensor:
        """Embeddings [tokens, hidden * (1 + levels)]."""
        output = self.tower(patches, grid_thw=grids)
        return torch.cat([output.pooler_output, *output.deepstack_features], dim=-1)


class Qwen3VLFamily(Qwen2VLFamily):
    """``Qwen3VLForConditionalGeneration`` folders."""

    name = "qwen3_vl"
    text_class = Qwen3VLTextModel
    tower_class = Qwen3VLVisionModel
    vision_class = Qwen3VLVision
    video_class = Qwen3VLVideoSettings

    @property
    def feature_levels(self) -> int:
        return len(self.config.vision_config.deepstack_visual_indexes)

    def level_arguments(
        self, rows: torch.Tensor, levels: torch.Tensor, token_count: int
    ) -> dict[str, Any]:
        mask = torch.zeros(1, token_count, dtype=torch.bool, device=rows.device)
        mask[0, rows] = True
        return {"visual_pos_masks": mask, "deepstack_visual_embeds": list(levels)}

    def plan_video_from_size(
        self, timestamps_s: Sequence[float], width: int, height: int
    ) -> ImagePlan:
        frames, least = len(timestamps_s), self._video.temporal_patch_size
        if self.video_token_id is not None and frames < least:
            raise InvalidRequestError(
                f"a video of {frames} frames: {self.name} takes at least {least}",
                field="video.frames",
                reason="VIDEO_FRAMES",
            )
        grid = self._video_grid(frames, width, height)
        return self._plan_segments(grid, self._time_speller.spell(timestamps_s))

    def plan_placed(self, grid: Grid, placed: Sequence[int]) -> ImagePlan:
        if placed[0] == self.embedding_token_id:
            return self.plan_image(grid)
        return self._plan_segments(grid, self._texts(grid, placed))

    def load_vision(self, dtype: torch.dtype, device: torch.device) -> torch.nn.Module:
        if self.video_token_id is not None:
            _ = (
                self._time_speller
            )  # who encodes also plans, and reads the tokenizer before it serves
        return super().load_vision(dtype, device)

    @cached_property
    def _time_speller(self) -> TimeSpeller:
        return TimeSpeller(self.folder, self._video.temporal_patch_size)

    def _plan_segments(self, grid: Grid, texts: Sequence[Sequence[int]]) -> ImagePlan:
        """The place of a video with these tokens before each of its temporal patches."""
        whole = self.plan_video(grid)
        segment = self.plan_video((1, *grid[1:]))
        placeholders: list[int] = []
        for text in texts:
            placeholders += [
                *text,
                self.config.vision_start_token_id,
                *segment.placeholder_ids,
                self.config.vision_end_token_id,
            ]
        return ImagePlan(
            grid=grid,
            anchor_token_id=whole.anchor_token_id,
            placeholder_ids=tuple(placeholders),
            position_delta=segment.position_delta * grid[0],
            embedding_tokens=whole.embedding_tokens,
        )

    def _texts(self, grid: Grid, placed: Sequence[int]) -> list[list[int]]:
        """The text tokens before each temporal patch of a placed video.

        Raises:
            InvalidRequestError: there are more or fewer patches, or rows of images in the text.
        """
        taken = self.plan_video((1, *grid[1:])).embedding_tokens + 1  # rows and the end marker
        texts: list[list[int]] = [[]]
        left = iter(placed)
        for token in left:
            if token != self.config.vision_start_token_id:
                texts[-1].append(token)
                continue
            texts.append([])
            for _ in range(taken):
                next(left, None)
        *texts, rest = texts
        rows = set(self.embedding_token_ids)
        if rest or len(texts) != grid[0] or any(rows.intersection(text) for text in texts):
            raise InvalidRequestError(
                f"the placeholders are not those of a video of grid {grid}", field="images"
            )
        return texts

    def _segments(
        self, token_ids: Sequence[int], images: Sequence[PromptImage], end: int
    ) -> Iterator[PromptImage]:
        for image in images:
            if image.offset >= end:
                return
            if token_ids[image.offset] == self.embedding_token_id:
                yield image
                continue
            assert image.grid is not None, "rope positions of a video need its grid"
            grid = (1, *image.grid[1:])
            length = self.plan_video(grid).embedding_tokens
            run = np.asarray(token_ids[image.offset : min(image.offset + image.length, end)])
            for place in np.flatnonzero(run == self.video_token_id)[::length]:
                yield PromptImage(image.offset + int(place), length, image.digest, grid)
