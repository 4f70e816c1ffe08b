"""Which bytes of which blocks go where. Pure functions of two layouts and two block lists."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from epd.engine.kv_layout import DTYPE_BYTES, KvLayout, KvRegion
from epd.transfer.segments import Column, SegmentArray


class BlockRun(NamedTuple):
    """``length`` neighbouring blocks here that are neighbours there too."""

    local: int
    remote: int
    length: int


@dataclass(frozen=True)
class BlockSlice:
    """Bytes of one block that both sides hold: offsets inside the block here and there."""

    local_offset: int
    remote_offset: int
    length: int


def block_runs(local: Sequence[int], remote: Sequence[int]) -> list[BlockRun]:
    """Pairs block ids position by position and joins neighbours."""
    assert len(local) == len(remote)
    runs: list[BlockRun] = []
    first = 0
    for index in range(1, len(local) + 1):
        if index < len(local):
            step = index - first
            if local[index] == local[first] + step and remote[index] == remote[first] + step:
                continue
        runs.append(BlockRun(local[first], remote[first], index - first))
        first = index
    return runs


def block_slices(local: KvLayout, remote: KvLayout) -> tuple[BlockSlice, ...]:
    """The part of a block that this rank writes to that rank: one slice when the heads are the
    same, else one for the keys and one for the values of the common heads, or none.

    A block is [k/v, kv_head, slot, head_dim], so the heads of a range are neighbours in it.
    """
    here_heads = local.head_count or local.kv_head_count
    there_heads = remote.head_count or remote.kv_head_count
    if (local.head_start, here_heads) == (remote.head_start, there_heads):
        return (BlockSlice(0, 0, local.block_bytes),)
    first = max(local.head_start, remote.head_start)
    last = min(local.head_start + here_heads, remote.head_start + there_heads)
    if first >= last:
        return ()
    head_bytes = local.block_size * local.head_dim * DTYPE_BYTES[local.dtype]
    return tuple(
        BlockSlice(
            (half * here_heads + first - local.head_start) * head_bytes,
            (half * there_heads + first - remote.head_start) * head_bytes,
            (last - first) * head_bytes,
        )
        for half in (0, 1)
    )


def run_segments(
    runs: Sequence[BlockRun], layer: int, local: KvLayout, remote: KvLayout
) -> tuple[SegmentArray, SegmentArray]:
    """Segment pairs of one layer: one pair per run where whole blocks lie densely on both sides,
    else one per block and slice.
    """
    here, there = local.region_of(layer), remote.region_of(layer)
    slices = block_slices(local, remote)
    dense = (
        len(slices) == 1
        and here.block_stride == local.block_bytes
        and there.block_stride == remote.block_bytes
        and slices[0].length == local.block_bytes == remote.block_bytes
    )
    sources, targets, counts = np.array(runs, dtype=np.int64).reshape(-1, 3).T
    lengths = counts * local.block_bytes
    offsets = np.zeros((2, 1), dtype=np.int64)
    if not dense:
        steps = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
        sources, targets = (np.repeat(first, counts) + steps for first in (sources, targets))
        pairs = [(one.local_offset, one.remote_offset) for one in slices]
        offsets = np.array(pairs, dtype=np.int64).reshape(-1, 2).T
        lengths = np.tile(np.array([one.length for one in slices], dtype=np.int64), len(sources))
    return (
        _segments(here, layer, sources, offsets[0], lengths),
        _segments(there, layer, targets, offsets[1], lengths),
    )


def _segments(
    region: KvRegion, layer: int, blocks: Column, offsets: Column, lengths: Column
) -> SegmentArray:
    """One segment per block and offset inside it, block by block."""
    starts = region.block_address(layer, 0) + blocks * region.block_stride
    return SegmentArray.at((starts[:, None] + offsets).ravel(), lengths, region.device_id)
