"""Runs the vision half of a model."""

from collections.abc import Sequence

import torch

from epd.engine.families.base import ModelFamily, PixelInput


class VisionRunner:
    """Turns preprocessed images, several of any sizes at once, into embeddings.

    Driven by one thread. Holds no state between calls but weights.
    """

    def __init__(self, family: ModelFamily, vision: torch.nn.Module, device: torch.device) -> None:
        self.family = family
        self._vision = vision
        self._device = device
        self._dtype = next(vision.parameters()).dtype

    @torch.inference_mode()
    def encode(self, images: Sequence[PixelInput]) -> list[torch.Tensor]:
        """Embeddings [tokens, hidden] of each image in order; views of one tensor."""
        patches = torch.cat([torch.from_numpy(image.patches) for image in images])
        grids = torch.tensor([image.grid for image in images], device=self._device)
        embeddings: torch.Tensor = self._vision(patches.to(self._device, self._dtype), grids)
        counts = [self.family.plan_image(image.grid).embedding_tokens for image in images]
        return list(torch.split(embeddings, counts))
