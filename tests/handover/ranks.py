"""Layouts and contents of tensor-parallel ranks over one model's KV."""

import dataclasses

import numpy as np

from epd.engine.head_ranges import rank_heads
from epd.engine.kv_layout import KvLayout, KvRegion


def of_rank(shape, degree, rank):
    """The layout of one rank."""
    heads = rank_heads(shape.kv_head_count, degree, rank)
    return dataclasses.replace(
        shape, tp_degree=degree, tp_rank=rank, head_start=heads.start, head_count=len(heads)
    )


def at(layout, address, num_blocks):
    """The layout with one dense region."""
    per_layer = num_blocks * layout.block_bytes
    length = layout.layer_count * per_layer
    region = KvRegion(0, layout.layer_count, address, length, 0, per_layer, layout.block_bytes)
    return dataclasses.replace(layout, regions=(region,))


def kv_of(layout, tokens_blocks, seed=5):
    """What a rank's blocks hold, [layer, block, plane, head, slot, dim]: its heads of a KV that
    everybody can draw.
    """
    whole = np.random.default_rng(seed).standard_normal(
        (
            layout.layer_count,
            tokens_blocks,
            layout.planes,
            layout.kv_head_count,
            layout.block_size,
            layout.head_dim,
        ),
        dtype=np.float32,
    )
    heads = slice(layout.head_start, layout.head_start + layout.heads_held)
    return np.ascontiguousarray(whole[:, :, :, heads])


def shape_of(heads, planes):
    """A small model."""
    return KvLayout("m", 3, heads, 8, "float32", 4, planes=planes)
