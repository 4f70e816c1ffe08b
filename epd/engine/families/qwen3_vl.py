"""Qwen3-VL: images as Qwen2-VL takes them, with DeepStack.

The vision tower's features of several depths go along with an image's embedding, and each depth is
added to the hidden states after one of the first layers. A row of the embedding holds all of them:
the token itself, then level after level, so whatever moves, keeps or checks embeddings needs to
know nothing of levels.
"""

from typing import Any

import torch
from transformers.models.qwen3_vl.modeling_qwen3_vl import Qwen3VLTextModel, Qwen3VLVisionModel

from epd.engine.families.qwen2_vl import Qwen2VLFamily


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
    """``Qwen3VLForConditionalGeneration`` folders. Videos, which it spells with times, not yet."""

    name = "qwen3_vl"
    text_class = Qwen3VLTextModel
    tower_class = Qwen3VLVisionModel
    vision_class = Qwen3VLVision

    def __init__(self, folder: Any, config: Any) -> None:
        super().__init__(folder, config)
        self.video_token_id = None

    @property
    def feature_levels(self) -> int:
        return len(self.config.vision_config.deepstack_visual_indexes)

    def level_arguments(
        self, rows: torch.Tensor, levels: torch.Tensor, token_count: int
    ) -> dict[str, Any]:
        mask = torch.zeros(1, token_count, dtype=torch.bool, device=rows.device)
        mask[0, rows] = True
        return {"visual_pos_masks": mask, "deepstack_visual_embeds": list(levels)}
