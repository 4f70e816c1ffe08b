"""Bias and penalties: what changes logits before temperature and filters.

Applied in this order, which is that of transformers' and vLLM's: bias, repetition penalty,
frequency and presence penalties. All rows of a step are changed together, so that more of them do
not cost more launches.
"""

from collections.abc import Iterable
from typing import NamedTuple

import torch

from epd.engine.token_history import TokenHistory
from epd.sampling import SamplingParams


class Change(NamedTuple):
    """What one row is changed by; without ``history`` its penalties are neutral."""

    row: int
    sampling: SamplingParams
    history: TokenHistory | None


class _Entries:
    """Values for single logits, gathered over rows."""

    def __init__(self) -> None:
        self.rows: list[int] = []
        self.tokens: list[int] = []
        self.values: list[float] = []

    def add(self, row: int, tokens: list[int], values: list[float]) -> None:
        self.rows += [row] * len(tokens)
        self.tokens += tokens
        self.values += values

    def on(self, logits: torch.Tensor) -> tuple[tuple[torch.Tensor, torch.Tensor], torch.Tensor]:
        """Index and values as tensors where ``logits`` lie."""
        index = torch.tensor([self.rows, self.tokens], device=logits.device)
        return (index[0], index[1]), logits.new_tensor(self.values)


def change_logits(logits: torch.Tensor, changes: Iterable[Change]) -> None:
    """Changes ``logits`` [rows, vocabulary] in place."""
    bias, repetition, output = _Entries(), _Entries(), _Entries()
    for row, sampling, history in changes:
        if sampling.logit_bias:
            tokens, values = zip(*sampling.logit_bias, strict=True)
            bias.add(row, list(tokens), list(values))
        if history is None:
            continue
        if sampling.repetition_penalty != 1.0:
            seen = history.seen
            repetition.add(row, seen, [sampling.repetition_penalty] * len(seen))
        if sampling.counts_output:
            counts = history.output_counts
            frequency, presence = sampling.frequency_penalty, sampling.presence_penalty
            output.add(row, list(counts), [-frequency * n - presence for n in counts.values()])
    if bias.rows:
        index, added = bias.on(logits)
        logits.index_put_(index, added, accumulate=True)
    if repetition.rows:
        index, penalties = repetition.on(logits)
        before = logits[index]
        logits.index_put_(index, torch.where(before < 0, before * penalties, before / penalties))
    if output.rows:
        index, added = output.on(logits)
        logits.index_put_(index, added, accumulate=True)
