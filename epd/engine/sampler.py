"""Draws tokens from logits, the same ones whatever else is in the batch.

Randomness is a function of (seed, choice, absolute position) alone: a request that goes on in
another worker, or is replayed, draws the tokens it would have drawn here.
"""

import struct
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from blake3 import blake3

from epd.engine.drawn_token import DrawnToken
from epd.engine.logit_changes import Change, change_logits
from epd.engine.token_history import TokenHistory
from epd.sampling import SamplingParams, TopLogprobs


@dataclass(frozen=True)
class Draw:
    """One token to draw: ``position`` is its index in prompt and output together.

    ``suppressed`` are tokens that may not be drawn (end tokens before min_tokens); ``history`` is
    what penalties count, None where there are none; ``allowed`` is what a grammar leaves, a bit per
    token.
    """

    sampling: SamplingParams
    position: int
    suppressed: frozenset[int] = frozenset()
    history: TokenHistory | None = None
    allowed: npt.NDArray[np.int32] | None = None


def uniform(seed: int, choice: int, position: int) -> float:
    """A number in [0, 1) with 53 random bits, a pure function of its arguments."""
    key = struct.pack("<QIQ", seed & (2**64 - 1), choice, position)
    return (int.from_bytes(blake3(key).digest(length=8), "little") >> 11) * 2.0**-53


def sample(logits: torch.Tensor, draws: Sequence[Draw]) -> list[DrawnToken]:
    """Draws one token per row of ``logits`` [draws, vocabulary] float32."""
    assert logits.shape[0] == len(draws)
    changed = _masked(_changed(logits, draws), draws)
    allowed = _suppress(changed, (draw.suppressed for draw in draws))
    tokens = allowed.argmax(-1)
    scale = logits.logsumexp(-1)
    sound = scale.isfinite().tolist()  # a row that is not has no distribution; its logprob is NaN
    for row, draw in enumerate(draws):
        if draw.sampling.temperature > 0 and sound[row]:
            point = uniform(draw.sampling.seed, draw.sampling.choice, draw.position)
            tokens[row] = _invert(_probabilities(allowed[row], draw.sampling), point)
    drawn = logits.gather(-1, tokens[:, None])[:, 0] - scale
    tops = _tops(logits, scale, draws)
    return [DrawnToken(*found) for found in zip(tokens.tolist(), drawn.tolist(), tops, strict=True)]


def _changed(logits: torch.Tensor, draws: Sequence[Draw]) -> torch.Tensor:
    """Logits after bias and penalties; the given ones when no draw has any."""
    changes = [
        Change(row, draw.sampling, draw.history)
        for row, draw in enumerate(draws)
        if draw.sampling.changes_logits
    ]
    if not changes:
        return logits
    changed = logits.clone()
    change_logits(changed, changes)
    return changed


def _masked(logits: torch.Tensor, draws: Sequence[Draw]) -> torch.Tensor:
    """Logits without the tokens that grammars forbid; the given ones when no draw has one."""
    allowed = {row: draw.allowed for row, draw in enumerate(draws) if draw.allowed is not None}
    if not allowed:
        return logits
    rows = list(allowed)
    words = torch.from_numpy(np.stack(list(allowed.values()))).to(logits.device)
    bits = (words[:, :, None] >> torch.arange(32, device=logits.device)) & 1
    forbidden = bits.flatten(1)[:, : logits.shape[1]] == 0
    masked = logits.clone()
    masked[rows] = masked[rows].masked_fill(forbidden, -torch.inf)
    return masked


def _tops(
    logits: torch.Tensor, scale: torch.Tensor, draws: Sequence[Draw]
) -> list[TopLogprobs | None]:
    """The likeliest tokens of each row that asks for them; None for the others."""
    counts = [min(draw.sampling.top_logprobs, logits.shape[-1]) for draw in draws]
    if not any(counts):
        return [None] * len(draws)
    top = logits.topk(max(counts), dim=-1)
    token_ids, logprobs = top.indices.tolist(), (top.values - scale[:, None]).tolist()
    return [
        TopLogprobs(tuple(token_ids[row][:count]), tuple(logprobs[row][:count])) if count else None
        for row, count in enumerate(counts)
    ]


def _suppress(logits: torch.Tensor, suppressed: Iterable[frozenset[int]]) -> torch.Tensor:
    pairs = [(row, token) for row, tokens in enumerate(suppressed) for token in tokens]
    if not pairs:
        return logits
    rows, tokens = torch.tensor(pairs, device=logits.device).T
    return logits.index_put((rows, tokens), logits.new_tensor(-torch.inf))


def _probabilities(logits: torch.Tensor, sampling: SamplingParams) -> torch.Tensor:
    """Probabilities [vocabulary] float64 after temperature, top-k, top-p and min-p, in that order.

    Filters keep all tokens that are as likely as the last one they keep, so ties do not depend on
    how a device sorts.
    """
    scaled = logits.double() / sampling.temperature
    if 0 < sampling.top_k < scaled.shape[0]:
        least = scaled.topk(sampling.top_k).values[-1]
        scaled = scaled.masked_fill(scaled < least, -torch.inf)
    probabilities = scaled.softmax(-1)
    if sampling.top_p < 1:
        ranked = probabilities.sort(descending=True).values
        before = ranked.cumsum(-1) - ranked
        least = ranked[(before < sampling.top_p).sum() - 1]
        probabilities = probabilities.where(probabilities >= least, 0)
    if sampling.min_p > 0:
        least = probabilities.max() * sampling.min_p
        probabilities = probabilities.where(probabilities >= least, 0)
    return probabilities


def _invert(probabilities: torch.Tensor, point: float) -> torch.Tensor:
    """The token at ``point`` of the cumulative distribution, never one of probability zero."""
    cumulative = probabilities.cumsum(-1)
    token = torch.searchsorted(cumulative, point * cumulative[-1], right=True)
    last = probabilities.nonzero()[-1, 0]  # rounding may carry the point past the end
    return torch.minimum(token, last)
