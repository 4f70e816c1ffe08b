"""Finds the family of a model folder. Families load lazily: only the one in use is imported."""

import importlib
import json
from pathlib import Path

from epd.engine.families.base import ModelFamily
from epd.errors import InvalidRequestError, UnsupportedFeatureError

#: ``model_type`` of config.json to "module:class".
FAMILIES = {
    "llama": "epd.engine.families.llama:LlamaFamily",
    "qwen2_vl": "epd.engine.families.qwen2_vl:Qwen2VLFamily",
    "qwen3_vl": "epd.engine.families.qwen3_vl:Qwen3VLFamily",
}


def load_family(folder: Path) -> ModelFamily:
    """Reads the configuration of a Hugging Face model folder.

    Raises:
        InvalidRequestError: there is no config.json.
        UnsupportedFeatureError: the model type is not one of ours; the message lists them.
    """
    path = folder / "config.json"
    if not path.is_file():
        raise InvalidRequestError(f"{folder} is no model folder: no config.json", field="model")
    model_type = json.loads(path.read_text()).get("model_type")
    if model_type not in FAMILIES:
        raise UnsupportedFeatureError(
            f"model type {model_type!r} is not supported, only {', '.join(sorted(FAMILIES))}",
            reason="MODEL_UNSUPPORTED",
        )
    from transformers import AutoConfig

    module, _, name = FAMILIES[model_type].partition(":")
    family: type[ModelFamily] = getattr(importlib.import_module(module), name)
    return family(folder, AutoConfig.from_pretrained(folder, local_files_only=True))
