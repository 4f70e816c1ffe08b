"""Steps over a paged KV cache and what attention over them must give, in float64."""

import math
from dataclasses import dataclass

import numpy as np
import torch

from epd.engine.attention import AttentionMetadata


@dataclass(frozen=True)
class Step:
    """``runs`` holds (tokens with KV before the step, tokens in the step) per sequence."""

    runs: tuple[tuple[int, int], ...]
    metadata: AttentionMetadata
    layer_kv: torch.Tensor
    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor


def make_step(
    runs: tuple[tuple[int, int], ...],
    heads: int = 4,
    kv_heads: int = 2,
    head_dim: int = 64,
    block_size: int = 16,
    seed: int = 0,
) -> Step:
    """Random contents in randomly scattered blocks; unused slots hold NaN."""
    generator = torch.Generator().manual_seed(seed)
    runs = tuple(sorted(runs, key=lambda run: run[1] != 1))  # single tokens come first
    lengths = [new for _, new in runs]
    contexts = [before + new for before, new in runs]
    used = [-(-context // block_size) for context in contexts]
    free = torch.randperm(sum(used) + 3, generator=generator).tolist()
    tables = torch.zeros(len(runs), max(used), dtype=torch.int32)
    layer_kv = torch.full((len(free), 2, kv_heads, block_size, head_dim), math.nan)
    for row, count in enumerate(used):
        tables[row, :count] = torch.tensor([free.pop() for _ in range(count)])
        for token in range(runs[row][0]):
            filler = torch.randn(2, kv_heads, head_dim, generator=generator)
            layer_kv[tables[row, token // block_size], :, :, token % block_size] = filler
    sequence = np.repeat(np.arange(len(runs)), lengths)
    index = np.concatenate([np.arange(before, before + new) for before, new in runs])
    starts = [0, *np.cumsum(lengths).tolist()]
    metadata = AttentionMetadata(
        block_size=block_size,
        slot_blocks=tables[sequence, index // block_size].long(),
        slot_offsets=torch.from_numpy(index % block_size),
        block_tables=tables,
        context_lens=torch.tensor(contexts, dtype=torch.int32),
        query_starts=torch.tensor(starts, dtype=torch.int32),
        context_lens_list=contexts,
        query_starts_list=starts,
        single_count=sum(new == 1 for new in lengths),
    )
    tokens = sum(lengths)
    return Step(
        runs,
        metadata,
        layer_kv,
        query=torch.randn(tokens, heads, head_dim, generator=generator),
        key=torch.randn(tokens, kv_heads, head_dim, generator=generator),
        value=torch.randn(tokens, kv_heads, head_dim, generator=generator),
    )


def reference_attention(step: Step, scale: float) -> torch.Tensor:
    """Softmax attention token by token in float64, from a cache that holds the step's KV."""
    output = []
    tables = step.metadata.block_tables
    size = step.metadata.block_size
    group = step.query.shape[1] // step.key.shape[1]
    for row, (before, new) in enumerate(step.runs):
        for token in range(new):
            query = step.query[step.metadata.query_starts_list[row] + token].double()
            seen = range(before + token + 1)
            kv = torch.stack(
                [step.layer_kv[tables[row, t // size], :, :, t % size] for t in seen], dim=2
            ).double()  # [2, kv_heads, tokens, head_dim]
            keys, values = kv.repeat_interleave(group, dim=1)
            weights = torch.softmax(torch.einsum("hd,htd->ht", query, keys) * scale, dim=-1)
            output.append(torch.einsum("ht,htd->hd", weights, values))
    return torch.stack(output)
