"""transformers ``generate`` as its users call it: SDPA attention, dynamic cache, one batch."""

import time
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, StoppingCriteria, StoppingCriteriaList

from bench.generated import Generated


class HfArm:
    """Holds the whole model in float32."""

    name = "hf"

    def __init__(self, folder: Path, threads: int) -> None:
        torch.set_num_threads(threads)
        self._model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        # No end token: every sequence runs to its full length, and no processor watches for one.
        self._model.generation_config.eos_token_id = None
        self.vocab_size = int(self._model.config.vocab_size)

    def generate(self, prompts: list[list[int]], new_tokens: int) -> Generated:
        """Continues prompts of equal length by exactly ``new_tokens`` greedy tokens each."""
        clock = _StepClock()
        with torch.inference_mode():
            output = self._model.generate(
                torch.tensor(prompts),
                attention_mask=torch.ones(len(prompts), len(prompts[0]), dtype=torch.long),
                do_sample=False,
                max_new_tokens=new_tokens,
                stopping_criteria=StoppingCriteriaList([clock]),
            )
        first, last = clock.times_ns[0], clock.times_ns[-1]
        tokens = output[:, len(prompts[0]) :].tolist()
        return Generated(tokens, (last - first) / 1e9 / (new_tokens - 1))


class _StepClock(StoppingCriteria):
    """Notes when each step's token is there; never stops anything."""

    def __init__(self) -> None:
        self.times_ns: list[int] = []

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor, **_: Any) -> torch.Tensor:
        self.times_ns.append(time.monotonic_ns())
        return torch.zeros(len(input_ids), dtype=torch.bool)
