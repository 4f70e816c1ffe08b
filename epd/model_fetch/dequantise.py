"""Unpacks a GGUF file into a plain Hugging Face folder; needs the extras engine and gguf."""

import importlib.util
from pathlib import Path

from epd.errors import UnavailableError

_NEEDED = ("torch", "transformers", "gguf", "accelerate")


def check_dequantiser() -> None:
    """Checks that what :func:`dequantise` imports is installed, before anything is downloaded.

    Raises:
        UnavailableError: names what is missing and the extra that brings it.
    """
    missing = [name for name in _NEEDED if importlib.util.find_spec(name) is None]
    if missing:
        raise UnavailableError(
            f"{', '.join(missing)} not installed; pip install 'epd[engine,gguf]' brings it"
        )


def dequantise(gguf: Path, folder: Path) -> None:
    """Writes config, generation config, fp32 safetensors, tokenizer and chat template.

    Everything comes from the GGUF file through transformers' own reader, so the folder loads with
    plain ``from_pretrained``.
    """
    # Imported here: the command line must answer --help without loading torch.
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    model = AutoModelForCausalLM.from_pretrained(
        gguf.parent,
        gguf_file=gguf.name,
        quantization_config=GgufConfig(gguf_file=gguf.name, dequantize=True),
        dtype=torch.float32,
    )
    # Dense now: a quantization entry in config.json would send loaders back to a GGUF file.
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    for file in folder.iterdir():  # safetensors writes 0600; containers read as another user
        file.chmod(0o644)
