"""Puts an engine together from a model folder. Slow (reads weights): not for an event loop."""

from functools import partial
from pathlib import Path

import torch

from epd.engine.block_pool import BlockPool
from epd.engine.engine import Engine
from epd.engine.engine_config import EngineConfig
from epd.engine.engine_core import LayerHook
from epd.engine.families.base import ModelFamily
from epd.engine.families.registry import load_family
from epd.engine.grammar import GrammarCompiler
from epd.engine.kv_cache import KVCache
from epd.engine.kv_layout import KvLayout
from epd.engine.language_runner import LanguageRunner
from epd.engine.layer_events import LayerEvents, record_on_stream
from epd.engine.native.select import Execution, choose_execution
from epd.engine.torch_attention import TorchAttention
from epd.engine.vision_runner import VisionRunner


def kv_layout(family: ModelFamily, model_digest: str, dtype: str, block_size: int) -> KvLayout:
    """The layout of a family's KV, regions not yet filled in."""
    shape = family.attention_shape
    return KvLayout(
        model_digest=model_digest,
        layer_count=shape.layer_count,
        kv_head_count=shape.kv_head_count,
        head_dim=shape.head_dim,
        dtype=dtype,
        block_size=block_size,
        head_count=shape.kv_head_count,
    )


def build_engine(
    folder: Path,
    config: EngineConfig,
    model_digest: str,
    layer_hook: LayerHook | None = None,
) -> Engine:
    """Loads the language half of a model and makes its KV memory; the engine is not started.

    Raises:
        InvalidRequestError: the folder or a setting is unfit.
        UnsupportedFeatureError: the model's family is unknown.
    """
    config.validate()
    family = load_family(folder)
    device = torch.device(config.device)
    modules = family.load_language(getattr(torch, config.dtype), device)
    layout = kv_layout(family, model_digest, config.dtype, config.block_size)
    execution = Execution(modules, TorchAttention)
    if config.native:
        execution = choose_execution(family, modules, config.threads)
    kv_cache = KVCache(layout, config.num_blocks, device)
    on_gpu = device.type == "cuda"
    events = LayerEvents(partial(record_on_stream, device)) if on_gpu else None
    runner = LanguageRunner(family, execution.modules, kv_cache, execution.attention, events)
    pool = BlockPool(config.num_blocks, config.block_size, config.prefix_cache)
    grammars = GrammarCompiler(folder, family.vocab_size, family.end_token_ids)
    return Engine(runner, pool, config, grammars, layer_hook)


def build_vision_runner(folder: Path, dtype: str = "float32", device: str = "cpu") -> VisionRunner:
    """Loads the vision half of a model.

    Raises:
        InvalidRequestError: the folder is unfit.
        UnsupportedFeatureError: the model has no vision.
    """
    family = load_family(folder)
    vision = family.load_vision(getattr(torch, dtype), torch.device(device))
    return VisionRunner(family, vision, torch.device(device))
