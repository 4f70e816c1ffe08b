"""A model folder with a random vision tower of any size and a small language half."""

import shutil
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import Qwen2VLConfig, Qwen2VLForConditionalGeneration
from transformers.models.qwen2_vl.configuration_qwen2_vl import Qwen2VLVisionConfig
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

#: Tokenizer, chat template and language half are those of the shipped model.
TEMPLATE = Path(__file__).parents[1] / "models" / "shapes-vl"
COPIED = (
    "tokenizer.json",
    "tokenizer_config.json",
    "chat_template.jinja",
    "generation_config.json",
)


@dataclass(frozen=True)
class Tower:
    """Size of a vision tower; ``image_side`` in pixels is what every image is resized to."""

    depth: int = 8
    embed_dim: int = 384
    num_heads: int = 6
    image_side: int = 224


def make_vision_model(folder: Path, tower: Tower, seed: int = 0) -> Path:
    """Saves a Qwen2-VL with that tower, weights drawn at random."""
    config = Qwen2VLConfig.from_pretrained(TEMPLATE)
    vision = config.vision_config
    assert isinstance(vision, Qwen2VLVisionConfig)
    vision.depth, vision.embed_dim, vision.num_heads = tower.depth, tower.embed_dim, tower.num_heads
    torch.manual_seed(seed)
    Qwen2VLForConditionalGeneration(config).save_pretrained(folder)
    pixels = tower.image_side**2
    size = {"shortest_edge": pixels, "longest_edge": pixels}
    Qwen2VLImageProcessorPil(size=size).save_pretrained(folder)
    for name in COPIED:
        shutil.copy(TEMPLATE / name, folder / name)
    return folder
