"""The vision half of a model, ready to run."""

from dataclasses import dataclass

import torch

from epd.engine.families.base import ModelFamily
from epd.engine.families.registry import load_family
from epd.engine.model_digest import model_digest
from epd.engine.vision_runner import VisionRunner
from epd.errors import UnsupportedFeatureError
from services.encoder.config import EncoderConfig


@dataclass(frozen=True)
class VisionParts:
    """Vision tower and projector, and nothing of the language half."""

    family: ModelFamily
    runner: VisionRunner
    model_digest: str


def load_vision_parts(config: EncoderConfig) -> VisionParts:
    """Reads the vision half from disk. Slow; not for an event loop.

    Raises:
        EpdError: the folder holds no supported model, or one without images.
    """
    family = load_family(config.model)
    if not family.accepts_images:
        raise UnsupportedFeatureError(
            f"{config.model} takes no images: it needs no encoder", reason="IMAGES_UNSUPPORTED"
        )
    device = torch.device(config.device)
    vision = family.load_vision(getattr(torch, config.dtype), device)
    return VisionParts(family, VisionRunner(family, vision, device), model_digest(config.model))
