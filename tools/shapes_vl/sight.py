"""First phase of training: the vision tower alone learns to see.

A step without the text layers costs a third of a whole one, and no question can be answered before
the picture tokens tell what they show.
"""

from __future__ import annotations

import time

import numpy as np
import torch
from torch import nn
from transformers import Qwen2VLForConditionalGeneration

from .heads import AuxiliaryHeads
from .loss import cell_losses
from .patches import build_patches
from .pool import Pool
from .threads import ThreadChooser


def learn_to_see(
    model: Qwen2VLForConditionalGeneration,
    heads: AuxiliaryHeads,
    optimizers: list[torch.optim.Optimizer],
    pool: Pool,
    rng: np.random.Generator,
    chooser: ThreadChooser,
    *,
    steps: int,
    minutes: float,
    learning_rate: float,
    warmup: int = 50,
    pictures: int = 64,
    renew_every: int = 8,
) -> None:
    """Train vision tower, projector and their probes, for some steps or minutes of wall time."""
    started = time.monotonic()
    recent: list[tuple[float, float]] = []
    for step in range(1, steps + 1):
        elapsed = (time.monotonic() - started) / 60
        progress = max(step / steps, elapsed / minutes)
        if progress >= 1:
            break
        if step % renew_every == 0:
            pool.renew()
        share = min(1.0, step / warmup) * min(1.0, 2 * (1.1 - progress))
        for optimizer in optimizers:
            for group in optimizer.param_groups:
                group["lr"] = group["scale"] * learning_rate * share
        chosen = [pool.pictures[int(index)] for index in pool.sample(rng, pictures)]
        chosen.sort(key=lambda picture: picture.grid[0] * picture.grid[1])
        with torch.autocast("cpu", torch.bfloat16):
            patch, feature = cell_losses(model, heads, build_patches(chosen))
        (patch + feature).backward()  # type: ignore[no-untyped-call]
        nn.utils.clip_grad_norm_([*model.parameters(), *heads.parameters()], 1.0)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        threads = chooser.update()
        recent = [*recent[-49:], (float(patch.detach()), float(feature.detach()))]
        if step % 25 == 0:
            means = " ".join(f"{mean:.3f}" for mean in np.mean(recent, axis=0))
            print(f"sight {step} {elapsed:.1f} min {threads} threads {means}", flush=True)
