"""Settings of a worker that runs the language half of a model."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from epd.config import option
from epd.engine.engine_config import EngineConfig
from epd.engine.kv_layout import KvLayout
from epd.worker.transfer_config import TransferConfig


@dataclass(frozen=True)
class LanguageConfig:
    """Which model, how much memory for its KV, how many requests at once."""

    model: Path = option(help="model folder as Hugging Face lays it out")
    model_name: str = option("", help="name shown to clients; empty takes the folder's name")
    dtype: Literal["float32", "bfloat16", "float16"] = option(
        "float32", help="element type of weights and KV"
    )
    device: str = option("cpu", help="torch device")
    threads: int = option(1, help="torch threads of the engine", minimum=1)
    block_size: int = option(32, help="tokens per KV block, equal on all workers", minimum=1)
    kv_blocks: int = option(
        0, help="KV blocks; 0 takes as many as fit into --kv-bytes", unit="blocks", minimum=0
    )
    kv_bytes: int = option(256 << 20, help="memory for KV", unit="bytes", minimum=1)
    max_running: int = option(32, help="requests computed at once", minimum=1)
    max_waiting: int = option(256, help="requests that may wait, one more is refused", minimum=0)
    token_budget: int = option(
        512, help="most tokens of one step: the length of a prefill chunk", minimum=1
    )
    tpot_target_ms: float = option(
        0.0,
        help="longest step while answers run, which prompts are cut to fit; 0 is no limit",
        unit="ms",
        minimum=0,
    )
    headroom_blocks: int = option(
        1, help="blocks kept free per running request that still grows", minimum=0
    )
    max_context: int = option(
        0, help="most tokens of prompt and output; 0 takes the model's", minimum=0
    )
    native: bool = option(True, help="native CPU kernels where they fit model and machine")
    prefix_cache: bool = option(True, help="keep finished KV blocks findable by content")
    transfer: TransferConfig = field(default_factory=TransferConfig)

    @property
    def served_name(self) -> str:
        """The model's name for clients."""
        return self.model_name or self.model.resolve().name

    def block_count(self, layout: KvLayout) -> int:
        """KV blocks to allocate for a layout; at least one."""
        return self.kv_blocks or max(1, self.kv_bytes // (layout.block_bytes * layout.layer_count))

    def engine_config(self, layout: KvLayout) -> EngineConfig:
        """The engine's own settings."""
        return EngineConfig(
            block_size=self.block_size,
            num_blocks=self.block_count(layout),
            max_running=self.max_running,
            max_waiting=self.max_waiting,
            token_budget=self.token_budget,
            step_target_s=self.tpot_target_ms / 1000,
            headroom_blocks=self.headroom_blocks,
            max_context=self.max_context or None,
            prefix_cache=self.prefix_cache,
            dtype=self.dtype,
            device=self.device,
            threads=self.threads,
            native=self.native,
        )
