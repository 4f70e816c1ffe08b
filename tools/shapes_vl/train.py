"""The training loop: schedule, averaging of weights, checkpoints."""

from __future__ import annotations

import copy
import os
import time
from collections.abc import Iterator

import numpy as np
import torch
from torch import nn
from transformers import PreTrainedTokenizerFast, Qwen2VLForConditionalGeneration

from .batch import Batch, build_batch
from .heads import AuxiliaryHeads
from .loss import compute_losses
from .mixture import Mixture, draw_step
from .model import build_config, build_model
from .plan import Plan, build_optimizers, easy_share
from .pool import Pool
from .report import Report
from .rows import RowWriter
from .save import save_folder, save_weights
from .sight import learn_to_see
from .threads import ThreadChooser
from .tokenizer import END_OF_TEXT, build_tokenizer, token_id


class Averaged:
    """Exponential moving average of the weights: what is saved and evaluated."""

    def __init__(self, model: Qwen2VLForConditionalGeneration) -> None:
        self.model = copy.deepcopy(model)
        self.model.requires_grad_(False)

    @torch.no_grad()
    def update(self, model: nn.Module, step: int) -> None:
        """Slower the longer training has run, so that early weights are forgotten quickly."""
        keep = min(0.998, (1 + step) / (10 + step))
        for average, weight in zip(self.model.parameters(), model.parameters(), strict=True):
            average.lerp_(weight, 1 - keep)


def train(plan: Plan) -> None:
    """Train from scratch, or from the state of an earlier run."""
    torch.manual_seed(plan.seed)
    rng = np.random.default_rng(plan.seed)
    tokenizer = build_tokenizer()
    config = build_config(tokenizer)
    pad_id = token_id(tokenizer, END_OF_TEXT)
    model = build_model(config)
    heads = AuxiliaryHeads(config)
    optimizers = build_optimizers(plan, model, heads)
    averaged = Averaged(model)
    first_step = 0
    if plan.state is not None and plan.state.exists():
        state = torch.load(plan.state, weights_only=True)
        for name, module in (("model", model), ("heads", heads), ("averaged", averaged.model)):
            module.load_state_dict(state[name])
        for optimizer, saved in zip(optimizers, state["optimizers"], strict=True):
            optimizer.load_state_dict(saved)
        first_step = int(state["step"])
        rng = np.random.default_rng((plan.seed, first_step))
    save_folder(averaged.model, tokenizer, plan.folder)

    started = time.monotonic()
    easy = easy_share(0.0)
    pool = Pool(plan.seed + first_step, plan.pool_pairs, plan.chunk_pairs, plan.workers, easy)
    print(f"pool ready after {time.monotonic() - started:.0f} s", flush=True)
    chooser = ThreadChooser(plan.threads)
    if first_step == 0:
        learn_to_see(
            model,
            heads,
            optimizers,
            pool,
            rng,
            chooser,
            steps=plan.sight_steps,
            minutes=plan.sight_minutes,
            learning_rate=plan.learning_rate,
        )
        averaged = Averaged(model)
        _checkpoint(plan, averaged.model, model, heads, optimizers, 0)
    started = time.monotonic()
    report = Report()
    step = first_step
    for batch in _batches(plan, rng, pool, tokenizer, pad_id):
        elapsed = (time.monotonic() - started) / 60
        progress = max(step / plan.steps, elapsed / plan.minutes)
        if progress >= 1:
            break
        pool.easy = easy_share(progress)
        for optimizer in optimizers:
            for group in optimizer.param_groups:
                rate = plan.rate(step - first_step, progress)
                group["lr"] = group["scale"] * rate
        with torch.autocast("cpu", torch.bfloat16):
            losses = compute_losses(model, heads, batch)
        fading = 1.0 if progress < 0.5 else 0.4
        losses.total(plan.auxiliary * fading).backward()  # type: ignore[no-untyped-call]
        nn.utils.clip_grad_norm_([*model.parameters(), *heads.parameters()], 1.0)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        step += 1
        averaged.update(model, step)
        report.add(losses, batch)
        threads = chooser.update()
        if step % 50 == 0:
            print(f"step {step} {elapsed:.1f} min {threads} threads {report.line()}", flush=True)
        if step % plan.save_every == 0:
            _checkpoint(plan, averaged.model, model, heads, optimizers, step)
    pool.close()
    _checkpoint(plan, averaged.model, model, heads, optimizers, step)


def _batches(
    plan: Plan,
    rng: np.random.Generator,
    pool: Pool,
    tokenizer: PreTrainedTokenizerFast,
    pad_id: int,
) -> Iterator[Batch]:
    writer = RowWriter(tokenizer)
    count = 0
    while True:
        count += 1
        if count % plan.renew_every == 0:
            pool.renew()
        yield build_batch(draw_step(rng, pool, writer, Mixture()), pad_id)


def _checkpoint(
    plan: Plan,
    averaged: Qwen2VLForConditionalGeneration,
    model: nn.Module,
    heads: nn.Module,
    optimizers: list[torch.optim.Optimizer],
    step: int,
) -> None:
    save_weights(averaged, plan.folder)
    if plan.state is not None:
        state = {
            "model": model.state_dict(),
            "heads": heads.state_dict(),
            "averaged": averaged.state_dict(),
            "optimizers": [optimizer.state_dict() for optimizer in optimizers],
            "step": step,
        }
        partial = plan.state.with_suffix(".partial")
        torch.save(state, partial)
        os.replace(partial, plan.state)
