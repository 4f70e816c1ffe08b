"""The vision tower over all pictures of a step at once.

The same computation as in transformers, which runs attention picture by picture.
"""

from __future__ import annotations

import torch
from torch.nn import functional
from transformers import Qwen2VLForConditionalGeneration

from .patches import PatchBatch


def encode_patches(model: Qwen2VLForConditionalGeneration, patches: PatchBatch) -> torch.Tensor:
    """The vision blocks over the patches of all pictures: (patches, width)."""
    visual = model.model.visual
    weight = visual.patch_embed.proj.weight.sum(dim=2).flatten(1)  # both frames are the same
    hidden = functional.linear(patches.values, weight)
    angles = (patches.places[..., None].float() * visual.rotary_pos_emb.inv_freq).flatten(1)
    angles = torch.cat([angles, angles], dim=-1)[:, None]
    cos, sin = angles.cos().to(hidden.dtype), angles.sin().to(hidden.dtype)
    for block in visual.blocks:
        attention = block.attn
        projected = attention.qkv(block.norm1(hidden))
        query, key, value = projected.view(-1, 3, attention.num_heads, attention.head_dim).unbind(1)
        query, key = (part * cos + rotate_half(part) * sin for part in (query, key))
        mixed = _attend(query * attention.scaling, key, value, patches.lengths)
        hidden = hidden + attention.proj(mixed)
        hidden = hidden + block.mlp(block.norm2(hidden))
    return hidden


def _attend(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, lengths: list[tuple[int, int]]
) -> torch.Tensor:
    """Full attention within every picture, for up to eight equally long pictures at a time."""
    mixed = []
    start = 0
    for length, pictures in lengths:
        while pictures:
            count = next(size for size in (8, 4, 2, 1) if size <= pictures)
            pictures -= count
            end = start + count * length
            parts = [
                part[start:end].view(count, length, *part.shape[1:]).transpose(1, 2)
                for part in (query, key, value)
            ]
            scores = parts[0] @ parts[1].transpose(-1, -2)
            weights = scores.softmax(-1).to(value.dtype)
            mixed.append((weights @ parts[2]).transpose(1, 2).reshape(count * length, -1))
            start = end
    mixed.append(value.new_zeros(len(value) - start, mixed[0].shape[1]))
    return torch.cat(mixed)


def rotate_half(values: torch.Tensor) -> torch.Tensor:
    """Rotary embedding's companion of a vector: its halves swapped, one of them negated."""
    first, second = values.chunk(2, dim=-1)
    return torch.cat([-second, first], dim=-1)
