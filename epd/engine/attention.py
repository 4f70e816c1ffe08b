"""Where a transformers model meets the paged KV: its attention layers call in here."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from transformers import AttentionInterface

ATTENTION_NAME = "epd_paged"


@dataclass(frozen=True)
class AttentionMetadata:
    """Geometry of one step, made once and read by every layer.

    The tokens of all sequences lie one after another, sequences with one token first. Sequence
    ``s`` owns rows ``query_starts[s]`` to ``query_starts[s + 1]``, which are the last of its
    ``context_lens[s]`` tokens; its token ``t`` lies in block ``block_tables[s, t // block_size]``,
    slot ``t % block_size``. Rows of ``block_tables`` are padded with block 0.

    The lists repeat what the tensors hold, for loops on the host.
    """

    #: Tokens per block.
    block_size: int
    #: int64 [tokens]: where the KV of each token goes.
    slot_blocks: torch.Tensor
    slot_offsets: torch.Tensor
    #: int32 [sequences, most blocks of any], [sequences], [sequences + 1].
    block_tables: torch.Tensor
    context_lens: torch.Tensor
    query_starts: torch.Tensor
    context_lens_list: Sequence[int]
    query_starts_list: Sequence[int]
    #: Leading sequences that have exactly one token in this step.
    single_count: int


class StepAttention(Protocol):
    """An implementation at work on one step; made from the metadata once, called per layer.

    ``layer_kv`` is [block, k/v, kv_head, slot, head_dim].
    """

    def write(self, layer_kv: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> None:
        """Stores the step's keys and values, both [tokens, kv_heads, head_dim]."""

    def attend(self, query: torch.Tensor, layer_kv: torch.Tensor, scale: float) -> torch.Tensor:
        """Causal attention of each token over its own sequence; [tokens, heads, head_dim]."""


#: Picks the implementation.
AttentionFactory = Callable[[AttentionMetadata], StepAttention]


@dataclass(frozen=True)
class PagedStep:
    """What travels through the model as a keyword argument to each attention layer.

    ``layer_written`` is called with a layer's index when what writes its KV of this step is done,
    or queued on a device that runs behind its host (see :mod:`epd.engine.layer_events`).
    ``before_layer`` is called with a layer's index before anything of it is written or read, and
    may wait or raise.
    """

    layers: Sequence[torch.Tensor]
    attention: StepAttention
    layer_written: Callable[[int], None] | None = None
    before_layer: Callable[[int], None] | None = None


def paged_attention(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float,
    paged_step: PagedStep,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """Transformers' attention function; query, key, value are [1, heads, tokens, head_dim]."""
    assert attention_mask is None, "paged attention makes its own mask"
    layer = module.layer_idx
    if paged_step.before_layer is not None:
        paged_step.before_layer(layer)
    layer_kv = paged_step.layers[layer]
    paged_step.attention.write(layer_kv, key[0].transpose(0, 1), value[0].transpose(0, 1))
    if paged_step.layer_written is not None:
        paged_step.layer_written(layer)
    output = paged_step.attention.attend(query[0].transpose(0, 1), layer_kv, scaling)
    return output[None], None


def register_attention() -> str:
    """Makes :func:`paged_attention` known to transformers and returns its name. Idempotent.

    No mask function is registered beside it: transformers then makes no mask at all.
    """
    AttentionInterface.register(ATTENTION_NAME, paged_attention)
    return ATTENTION_NAME
