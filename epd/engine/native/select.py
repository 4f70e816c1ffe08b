"""Decides between the native kernels and plain torch, and says so once."""

import logging
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from epd.engine.attention import AttentionFactory
from epd.engine.families.base import LanguageModules, ModelFamily
from epd.engine.native.attention import NativeAttention
from epd.engine.native.build import NativeBuildError
from epd.engine.native.decoder import NativeDecoder, NativeLinear
from epd.engine.native.library import NativeLibrary
from epd.engine.native.structs import LayerShape
from epd.engine.torch_attention import TorchAttention

log = logging.getLogger(__name__)

#: Models whose decoder layer is exactly the native one: RMS norm, rotary halves, gated SiLU.
NATIVE_MODEL_TYPES = frozenset({"llama", "qwen2_vl_text"})


@dataclass(frozen=True)
class Execution:
    """What a language runner runs: the modules to call and the attention they call."""

    modules: LanguageModules
    attention: AttentionFactory


def choose_execution(
    family: ModelFamily, modules: LanguageModules, threads: int | None = None
) -> Execution:
    """The native kernels where they fit this model and machine, plain torch elsewhere.

    ``threads`` is the number the kernels use, None takes torch's.
    """
    try:
        library = NativeLibrary(threads or torch.get_num_threads())
        _check_tensors(family, modules, library)
    except NativeBuildError as error:
        log.warning("plain torch instead of native kernels: %s", error)
        return Execution(modules, TorchAttention)
    attention = partial(NativeAttention, library)
    reason = _foreign_layer(family.text_config, modules.body)
    if reason is not None:
        log.info("native attention, the rest of each layer in torch: %s", reason)
        return Execution(modules, attention)
    native = LanguageModules(
        modules.embed_tokens,
        NativeDecoder(modules.body, _shape(family), library),
        NativeLinear(modules.lm_head, library),  # type: ignore[arg-type]
    )
    return Execution(native, attention)


def _check_tensors(family: ModelFamily, modules: LanguageModules, library: NativeLibrary) -> None:
    weight = next(modules.body.parameters())
    if weight.device.type != "cpu" or weight.dtype != torch.float32:
        raise NativeBuildError(f"weights are {weight.dtype} on {weight.device.type}")
    head_dim = family.attention_shape.head_dim
    if head_dim % library.lanes:
        raise NativeBuildError(f"head size {head_dim} is no multiple of {library.lanes}")


def _foreign_layer(config: Any, body: Any) -> str | None:
    """Why the native decoder layer would not compute what the model's does; None if it would."""
    if config.model_type not in NATIVE_MODEL_TYPES:
        return f"model type {config.model_type}"
    if config.hidden_act != "silu":
        return f"activation {config.hidden_act}"
    if set(getattr(config, "layer_types", None) or ["full_attention"]) != {"full_attention"}:
        return "sliding-window layers"
    if body.layers[0].mlp.down_proj.bias is not None:
        return "biases in the MLP"
    return None


def _shape(family: ModelFamily) -> LayerShape:
    config, attention = family.text_config, family.attention_shape
    return LayerShape(
        hidden=config.hidden_size,
        intermediate=config.intermediate_size,
        heads=attention.query_head_count,
        kv_heads=attention.kv_head_count,
        head_dim=attention.head_dim,
        norm_eps=config.rms_norm_eps,
        scale=attention.head_dim**-0.5,
    )
