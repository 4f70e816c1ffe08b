"""Writing the model folder, so that a reader never sees half a checkpoint."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

from transformers import PreTrainedTokenizerFast, Qwen2VLForConditionalGeneration

from .model import build_image_processor


def save_folder(
    model: Qwen2VLForConditionalGeneration, tokenizer: PreTrainedTokenizerFast, folder: Path
) -> None:
    """Write everything but the model card; weights that exist already are kept."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save_pretrained(folder)
    build_image_processor().save_pretrained(folder)
    model.config.save_pretrained(folder)
    model.generation_config.save_pretrained(folder)
    if not (folder / "model.safetensors").exists():
        save_weights(model, folder)


def save_weights(model: Qwen2VLForConditionalGeneration, folder: Path) -> None:
    """Replace the weights atomically; all other files stay the same during training."""
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=".weights-") as partial:
        model.save_pretrained(partial)
        os.chmod(Path(partial) / "model.safetensors", 0o644)
        os.replace(Path(partial) / "model.safetensors", folder / "model.safetensors")
