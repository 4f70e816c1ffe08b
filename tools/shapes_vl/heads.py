"""Auxiliary heads, used in training only.

They tell picture tokens early what they should know: where they are, what their cell holds, which
picture they belong to, and whether their cell changed between two pictures.
"""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional
from transformers import Qwen2VLConfig

from .model import MERGE_SIZE, text_config, vision_config
from .patches import IGNORED, PatchBatch
from .scene import COLOURS, KINDS

_CELL_CLASSES = [4, len(COLOURS) + 1, len(KINDS) + 1]  # place, colour or none, kind or none


class AuxiliaryHeads(nn.Module):
    """Linear probes; not part of the released model."""

    def __init__(self, config: Qwen2VLConfig) -> None:
        super().__init__()
        vision, text = vision_config(config).embed_dim, text_config(config).hidden_size
        self.patch_norm = nn.LayerNorm(vision)
        self.patch = nn.Linear(vision, sum(_CELL_CLASSES))
        self.feature_norm = nn.LayerNorm(text)
        self.feature = nn.Linear(text, sum(_CELL_CLASSES))
        self.ordinal_norm = nn.LayerNorm(text)
        self.ordinal = nn.Linear(text, 4)
        self.change_norm = nn.LayerNorm(text)
        self.change = nn.Linear(text, 2)

    def seeing(
        self, encoded: torch.Tensor, features: torch.Tensor, patches: PatchBatch
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Losses of what patches and picture tokens fail to tell about their cells."""
        targets = patches.targets
        return (
            _cell_loss(self.patch(self.patch_norm(encoded)), targets),
            _cell_loss(self.feature(self.feature_norm(features)), targets[:: MERGE_SIZE**2]),
        )


def _cell_loss(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    place, colour, kind = torch.split(logits.float(), _CELL_CLASSES, dim=-1)
    return (
        0.3 * functional.cross_entropy(place, targets[:, 0], ignore_index=IGNORED)
        + functional.cross_entropy(colour, targets[:, 1], ignore_index=IGNORED)
        + functional.cross_entropy(kind, targets[:, 2], ignore_index=IGNORED)
    )
