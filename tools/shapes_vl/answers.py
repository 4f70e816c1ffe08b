"""The text layers over the sequences of a step, up to the losses of the answers.

The modules of the transformers model are used as they are, except in the last layer, where only
the tokens that predict a part of an answer are computed.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.nn import functional
from transformers import Qwen2VLForConditionalGeneration
from transformers.models.qwen2_vl.modeling_qwen2_vl import Qwen2VLDecoderLayer

from .batch import TextBatch
from .encode import rotate_half
from .heads import AuxiliaryHeads
from .patches import IGNORED

_ORDINAL_LAYER = 1  # index of the text layer after which the auxiliary heads read
_CHANGE_LAYER = 2


@dataclass(frozen=True)
class TextLosses:
    """Sums and single values of one part, to be put together."""

    answer: torch.Tensor
    weight: float
    ordinal: torch.Tensor
    change: torch.Tensor
    right: torch.Tensor


def text_losses(
    model: Qwen2VLForConditionalGeneration,
    heads: AuxiliaryHeads,
    batch: TextBatch,
    features: torch.Tensor,
) -> TextLosses:
    """Run the sequences of one part, with the encoded pictures in their places."""
    text = model.model.language_model
    embedded = text.embed_tokens(batch.ids)
    picked = features[batch.image_features].to(embedded.dtype)
    hidden = embedded.flatten(0, 1).index_copy(0, batch.image_slots, picked).view_as(embedded)
    rotary = text.rotary_emb(hidden, batch.positions)
    ordinal = change = torch.zeros(0)
    for index, layer in enumerate(text.layers[:-1]):
        hidden = layer(hidden, attention_mask=batch.mask, position_embeddings=rotary)
        if index == _ORDINAL_LAYER:
            logits = heads.ordinal(heads.ordinal_norm(hidden)).float()
            logits = logits.flatten(0, 1)[batch.image_slots]
            ordinal = functional.cross_entropy(logits, batch.ordinals, reduction="none")
        elif index == _CHANGE_LAYER:
            known = batch.changes != IGNORED
            logits = heads.change(heads.change_norm(hidden)).float()
            logits = logits.flatten(0, 1)[batch.image_slots[known]]
            change = functional.cross_entropy(logits, batch.changes[known], reduction="none")
    answers = _last_layer(text.layers[-1], hidden, rotary, batch)
    logits = model.lm_head(text.norm(answers)).float().flatten(0, 1)
    losses = functional.cross_entropy(logits, batch.answer_ids.flatten(), reduction="none")
    weights = batch.answer_weights.flatten()
    right = (logits.argmax(-1) == batch.answer_ids.flatten()).float()[weights > 0]
    kinds = len(batch.turn_kinds)
    return TextLosses(
        answer=(losses * weights).sum(),
        weight=float(weights.sum()),
        ordinal=ordinal,
        change=change,
        right=torch.ones(kinds).scatter_reduce(0, batch.answer_turns, right, "amin"),
    )


def _last_layer(
    layer: Qwen2VLDecoderLayer,
    hidden: torch.Tensor,
    rotary: tuple[torch.Tensor, torch.Tensor],
    batch: TextBatch,
) -> torch.Tensor:
    """The last layer, only for the tokens whose successor is part of an answer."""
    attention = layer.self_attn
    rows, length, width = hidden.shape
    columns = batch.answer_columns
    picks = columns[..., None]
    normed = layer.input_layernorm(hidden)
    chosen = normed.gather(1, picks.expand(-1, -1, width))
    heads = (rows, -1, attention.num_heads, attention.head_dim)
    groups = (rows, -1, attention.num_key_value_heads, attention.head_dim)
    query = attention.q_proj(chosen).view(heads).transpose(1, 2)
    key = attention.k_proj(normed).view(groups).transpose(1, 2)
    value = attention.v_proj(normed).view(groups).transpose(1, 2)
    cos, sin = (part[:, None] for part in rotary)
    at = picks[:, None].expand(-1, 1, -1, attention.head_dim)
    query = query * cos.gather(2, at) + rotate_half(query) * sin.gather(2, at)
    key = key * cos + rotate_half(key) * sin
    mixed = functional.scaled_dot_product_attention(
        query.to(value.dtype),
        key.to(value.dtype).repeat_interleave(attention.num_key_value_groups, 1),
        value.repeat_interleave(attention.num_key_value_groups, 1),
        attn_mask=batch.mask.gather(2, picks[:, None].expand(-1, 1, -1, length)),
    )
    output = attention.o_proj(mixed.transpose(1, 2).flatten(2))
    output = output + hidden.gather(1, picks.expand(-1, -1, width))
    result: torch.Tensor = output + layer.mlp(layer.post_attention_layernorm(output))
    return result
