"""How long and how fast to train: settings, schedules, optimizers."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

_MUON_SCALE = 2.0  # its learning rate, relative to that of AdamW


@dataclass(frozen=True)
class Plan:
    """How long to train, and how.  Training ends at ``steps`` or ``minutes``, what comes first."""

    folder: Path
    seed: int = 0
    steps: int = 5400
    minutes: float = float("inf")
    sight_steps: int = 2000  # before the first step: the vision tower alone
    sight_minutes: float = float("inf")
    learning_rate: float = 1.5e-3
    weight_decay: float = 0.05
    warmup: int = 100
    decay_share: float = 0.3  # of the whole, at the end, with a falling learning rate
    auxiliary: float = 1.0
    pool_pairs: int = 4096
    chunk_pairs: int = 64
    renew_every: int = 8
    save_every: int = 100
    threads: int = 2
    workers: int = 2
    state: Path | None = None  # where to keep what is needed to go on after an interruption

    def rate(self, step: int, progress: float) -> float:
        """Warm-up, constant, linear fall: the constant part can be made longer without regret."""
        rise = min(1.0, (step + 1) / self.warmup)
        fall = min(1.0, (1 - progress) / self.decay_share)
        return self.learning_rate * rise * max(fall, 0.01)


def easy_share(progress: float) -> float:
    """Share of easy pictures among new ones."""
    return 0.6 if progress < 0.3 else 0.25 if progress < 0.55 else 0.0


def build_optimizers(plan: Plan, model: nn.Module, heads: nn.Module) -> list[torch.optim.Optimizer]:
    """Muon for the matrices of the blocks, AdamW for everything else."""
    inner, embeddings, vectors = [], [], []
    for name, parameter in [*model.named_parameters(), *heads.named_parameters()]:
        if parameter.ndim < 2:
            vectors.append(parameter)
        elif "layers." in name or "blocks." in name or "merger." in name:
            inner.append(parameter)
        else:
            embeddings.append(parameter)
    groups = [
        {"params": embeddings, "weight_decay": plan.weight_decay, "scale": 1.0},
        {"params": vectors, "weight_decay": 0.0, "scale": 1.0},
    ]
    return [
        torch.optim.Muon(
            [{"params": inner, "scale": _MUON_SCALE}],
            lr=plan.learning_rate,
            weight_decay=plan.weight_decay,
            adjust_lr_fn="match_rms_adamw",
        ),
        torch.optim.AdamW(groups, lr=plan.learning_rate, betas=(0.9, 0.98), fused=True),
    ]
