"""The language half of a model with the memory for its KV."""

from dataclasses import dataclass

import torch

from epd.engine.block_pool import BlockPool
from epd.engine.engine_config import EngineConfig
from epd.engine.families.base import ModelFamily
from epd.engine.families.registry import load_family
from epd.engine.kv_cache import KVCache
from epd.engine.kv_layout import KvLayout
from epd.engine.language_runner import LanguageRunner
from epd.engine.model_digest import model_digest
from epd.engine.native.select import choose_execution
from epd.transfer.base import Segment
from epd.worker.language_config import LanguageConfig


@dataclass(frozen=True)
class ModelParts:
    """What an engine is made of. Exists once per process; the KV memory never moves."""

    family: ModelFamily
    layout: KvLayout
    pool: BlockPool
    runner: LanguageRunner
    engine_config: EngineConfig

    @property
    def context_length(self) -> int:
        """Most tokens of prompt and output together."""
        limit = self.engine_config.max_context
        return min(limit or self.family.context_length, self.family.context_length)

    @property
    def kv_memory(self) -> list[tuple[Segment, str]]:
        """The KV memory with its kind, to be registered once."""
        kind = "DRAM" if self.runner.kv_cache.tensor.is_cpu else "VRAM"
        return [
            (Segment(region.address, region.length, region.device_id), kind)
            for region in self.layout.regions
        ]


def load_model_parts(config: LanguageConfig) -> ModelParts:
    """Reads the language half from disk and allocates its KV. Slow; not for an event loop.

    Raises:
        EpdError: the folder holds no model that is supported.
    """
    torch.set_num_threads(config.threads)
    device, dtype = torch.device(config.device), getattr(torch, config.dtype)
    family = load_family(config.model)
    shape = family.attention_shape
    layout = KvLayout(
        model_digest=model_digest(config.model),
        layer_count=shape.layer_count,
        kv_head_count=shape.kv_head_count,
        head_dim=shape.head_dim,
        dtype=config.dtype,
        block_size=config.block_size,
        head_count=shape.kv_head_count,
    )
    engine_config = config.engine_config(layout)
    execution = choose_execution(family, family.load_language(dtype, device), config.threads)
    kv_cache = KVCache(layout, engine_config.num_blocks, device)
    return ModelParts(
        family=family,
        layout=kv_cache.layout,
        pool=BlockPool(engine_config.num_blocks, config.block_size, config.prefix_cache),
        runner=LanguageRunner(family, execution.modules, kv_cache, execution.attention),
        engine_config=engine_config,
    )
