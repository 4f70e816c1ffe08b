"""The engine of a language worker and the memory that peers may reach."""

from epd.engine.build import build_engine, kv_layout
from epd.engine.engine import Engine
from epd.engine.engine_core import LayerHook
from epd.engine.families.registry import load_family
from epd.engine.model_digest import model_digest
from epd.transfer.base import Segment
from epd.worker.language_config import LanguageConfig


def load_language_engine(config: LanguageConfig, layer_hook: LayerHook | None = None) -> Engine:
    """Reads the language half from disk and allocates its KV. Slow; not for an event loop.

    Raises:
        EpdError: the folder holds no model that is supported, or a setting does not fit it.
    """
    digest = model_digest(config.model)
    layout = kv_layout(load_family(config.model), digest, config.dtype, config.block_size)
    return build_engine(config.model, config.engine_config(layout), digest, layer_hook)


def kv_memory(engine: Engine) -> list[tuple[Segment, str]]:
    """The KV memory with its kind, DRAM or VRAM, to be registered once."""
    kind = "DRAM" if engine.kv_cache.tensor.is_cpu else "VRAM"
    return [
        (Segment(region.address, region.length, region.device_id), kind)
        for region in engine.kv_cache.layout.regions
    ]
