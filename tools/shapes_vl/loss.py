"""The training objective: right answers, and picture tokens that know what they show."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from transformers import Qwen2VLForConditionalGeneration

from .answers import text_losses
from .batch import Batch
from .encode import encode_patches
from .heads import AuxiliaryHeads
from .patches import PatchBatch


@dataclass(frozen=True)
class Losses:
    """Answer loss, auxiliary losses, and which answers greedy decoding would get right."""

    answer: torch.Tensor
    patch: torch.Tensor
    feature: torch.Tensor
    ordinal: torch.Tensor
    change: torch.Tensor
    right: torch.Tensor  # for every question: is the whole answer right?

    def total(self, auxiliary: float) -> torch.Tensor:
        """The quantity that is minimised."""
        seeing = self.patch + self.feature
        return self.answer + auxiliary * (seeing + 0.3 * self.ordinal + 0.5 * self.change)


def compute_losses(
    model: Qwen2VLForConditionalGeneration, heads: AuxiliaryHeads, batch: Batch
) -> Losses:
    """Forward pass over one batch."""
    patches = batch.patches
    encoded = encode_patches(model, patches)
    features = model.model.visual.merger(encoded)
    patch, feature = heads.seeing(encoded, features, patches)
    parts = [text_losses(model, heads, text, features) for text in batch.texts]
    weight = sum(part.weight for part in parts)
    return Losses(
        answer=torch.stack([part.answer for part in parts]).sum() / weight,
        patch=patch,
        feature=feature,
        ordinal=torch.cat([part.ordinal for part in parts]).mean(),
        change=torch.cat([part.change for part in parts]).mean(),
        right=torch.cat([part.right for part in parts]),
    )


def cell_losses(
    model: Qwen2VLForConditionalGeneration, heads: AuxiliaryHeads, patches: PatchBatch
) -> tuple[torch.Tensor, torch.Tensor]:
    """What patches and picture tokens fail to tell about their cells; no text is involved."""
    encoded = encode_patches(model, patches)
    return heads.seeing(encoded, model.model.visual.merger(encoded), patches)
