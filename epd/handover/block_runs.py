"""Which bytes of which blocks go where. Pure functions of two layouts and two block lists."""

from collections.abc import Sequence
from dataclasses import dataclass

from epd.engine.kv_layout import DTYPE_BYTES, KvLayout
from epd.transfer.base import Segment


@dataclass(frozen=True)
class BlockRun:
    """``count`` neighbouring blocks here that are neighbours there too."""

    local: int
    remote: int
    count: int


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
) -> tuple[list[Segment], list[Segment]]:
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
    sources: list[Segment] = []
    targets: list[Segment] = []
    for run in runs:
        if dense:
            length = run.count * here.block_stride
            sources.append(Segment(here.block_address(layer, run.local), length, here.device_id))
            targets.append(Segment(there.block_address(layer, run.remote), length, there.device_id))
            continue
        for step in range(run.count):
            source = here.block_address(layer, run.local + step)
            target = there.block_address(layer, run.remote + step)
            for part in slices:
                sources.append(Segment(source + part.local_offset, part.length, here.device_id))
                targets.append(Segment(target + part.remote_offset, part.length, there.device_id))
    return sources, targets
