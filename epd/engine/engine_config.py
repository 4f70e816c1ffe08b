"""Settings of an engine."""

from dataclasses import dataclass

from epd.errors import InvalidRequestError


@dataclass(frozen=True)
class EngineConfig:
    """Sizes and bounds; tokens, blocks and requests are counts."""

    #: Tokens per KV block.
    block_size: int = 32
    #: Blocks in the pool.
    num_blocks: int = 1024
    #: Requests that are computed at once.
    max_running: int = 64
    #: Requests that may wait; one more is refused.
    max_waiting: int = 256
    #: Most tokens of one step: the length of a prefill chunk and the decode stall it causes.
    token_budget: int = 512
    #: Longest step while answers run: prompts are cut into chunks that fit. 0 sets no limit.
    step_target_s: float = 0.0
    #: Blocks kept free per running request that still grows, before another is admitted.
    headroom_blocks: int = 1
    #: Most tokens of prompt and output; None takes the model's.
    max_context: int | None = None
    #: Whether finished blocks stay findable by content.
    prefix_cache: bool = True
    #: Element type of weights and KV: float32, bfloat16 or float16.
    dtype: str = "float32"
    #: Torch device.
    device: str = "cpu"
    #: Torch threads of the engine thread; None leaves torch's own choice.
    threads: int | None = None
    #: Native CPU kernels where they fit model and machine; plain torch elsewhere.
    native: bool = True

    def validate(self) -> None:
        """Checks what would stop the engine from getting on.

        Raises:
            InvalidRequestError: names the setting.
        """
        for name in ("block_size", "num_blocks", "max_running"):
            if getattr(self, name) < 1:
                raise InvalidRequestError(f"{name} must be at least 1", field=name)
        if self.token_budget <= self.max_running:
            raise InvalidRequestError(
                f"token_budget {self.token_budget} must exceed max_running {self.max_running}: "
                "decoding requests would leave no room for prompts",
                field="token_budget",
            )
