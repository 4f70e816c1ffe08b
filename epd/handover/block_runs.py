"""Which bytes of which blocks go where. Pure functions of two layouts and two block lists."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from epd.engine.head_ranges import written_heads
from epd.engine.kv_layout import DTYPE_BYTES, KvLayout
from epd.transfer.segments import Column, SegmentArray

#: int64 [runs, (first block here, first block there, blocks)]: neighbours here that are there too.
Runs = npt.NDArray[np.int64]


@dataclass(frozen=True)
class BlockSlice:
    """Bytes of one block that both sides hold: offsets inside the block here and there."""

    local_offset: int
    remote_offset: int
    length: int


def block_runs(local: Sequence[int], remote: Sequence[int]) -> Runs:
    """Pairs block ids position by position and joins neighbours."""
    # Plain Python: for up to some 100 blocks, array operations that have left the caches cost more.
    runs: list[int] = []
    here = there = -2
    for source, target in zip(local, remote, strict=True):
        if source == here + 1 and target == there + 1:
            runs[-1] += 1
        else:
            runs += source, target, 1
        here, there = source, target
    return np.array(runs, dtype=np.int64).reshape(-1, 3)


def block_slices(local: KvLayout, remote: KvLayout) -> tuple[BlockSlice, ...]:
    """The part of a block that this rank writes to that rank: one slice when both hold the same
    heads, else one per plane (keys, values), or none.

    A block is [plane, kv_head, slot, head_dim], so the heads of a range are neighbours in it.
    """
    heads = written_heads(
        local.kv_head_count,
        (local.tp_degree, local.tp_rank),
        (remote.tp_degree, remote.tp_rank),
    )
    if not heads:
        return ()
    if len(heads) == local.heads_held == remote.heads_held:
        return (BlockSlice(0, 0, local.block_bytes),)
    head_bytes = local.block_size * local.head_dim * DTYPE_BYTES[local.dtype]
    return tuple(
        BlockSlice(
            (plane * local.heads_held + heads.start - local.head_start) * head_bytes,
            (plane * remote.heads_held + heads.start - remote.head_start) * head_bytes,
            len(heads) * head_bytes,
        )
        for plane in range(local.planes)
    )


class KvRoute:
    """From the blocks of one layout to those of another. Made once for a pair of workers: what is
    the same for every WRITE is worked out here.
    """

    def __init__(self, local: KvLayout, remote: KvLayout) -> None:
        self._slices = block_slices(local, remote)
        layers = range(local.layer_count)
        self._here, self._there = _Places.of(local, layers), _Places.of(remote, layers)
        whole = self._slices == (BlockSlice(0, 0, local.block_bytes),)
        #: Neighbouring blocks are one segment.
        self._joins = whole and self._here.dense and self._there.dense
        self._slice_bytes = sum(one.length for one in self._slices)
        parts = [(one.local_offset, one.remote_offset, one.length) for one in self._slices]
        self._parts = np.array(parts, dtype=np.int64).reshape(-1, 3).T

    def layer_bytes(self, block_count: int) -> int:
        """Bytes of one layer of so many blocks."""
        return block_count * self._slice_bytes

    def segments(self, runs: Runs, layers: range) -> tuple[SegmentArray, SegmentArray]:
        """Segment pairs of some layers: one pair per layer and run where whole blocks lie densely
        on both sides, else one per layer, block and slice.
        """
        sources, targets, counts = runs.T
        if self._joins:
            return self._here.runs(layers, sources, counts), self._there.runs(
                layers, targets, counts
            )
        steps = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
        sources, targets = (np.repeat(first, counts) + steps for first in (sources, targets))
        source_offsets, target_offsets, lengths = self._parts
        return (
            self._here.segments(layers, sources, source_offsets, lengths),
            self._there.segments(layers, targets, target_offsets, lengths),
        )


@dataclass(frozen=True)
class _Places:
    """Where the layers lie on one side: int64 [layers, (address of block 0, stride, device)]."""

    rows: npt.NDArray[np.int64]
    block_bytes: int
    #: Neighbouring blocks touch each other.
    dense: bool

    @classmethod
    def of(cls, layout: KvLayout, layers: Sequence[int]) -> "_Places":
        regions = [layout.region_of(layer) for layer in layers]
        rows = [
            (one.block_address(layer, 0), one.block_stride, one.device_id)
            for one, layer in zip(regions, layers, strict=True)
        ]
        block_bytes = layout.block_bytes
        dense = all(one.block_stride == block_bytes for one in regions)
        return cls(np.array(rows, dtype=np.int64).reshape(-1, 3), block_bytes, dense)

    def runs(self, layers: range, firsts: Column, counts: Column) -> SegmentArray:
        """One segment per layer and run of neighbouring whole blocks. Dense places only."""
        rows = np.empty((len(layers), len(firsts), 3), dtype=np.int64)
        places = self.rows[layers.start : layers.stop, :, None]
        np.add(places[:, 0], firsts * self.block_bytes, out=rows[..., 0])
        rows[..., 1] = counts * self.block_bytes
        rows[..., 2] = places[:, 2]
        return SegmentArray(rows.reshape(-1, 3))

    def segments(
        self, layers: range, blocks: Column, offsets: Column, lengths: Column
    ) -> SegmentArray:
        """One segment per layer, block and offset inside it; ``lengths`` has one per offset."""
        bases = self.rows[layers.start : layers.stop, :, None, None]
        rows = np.empty((len(bases), len(blocks), len(offsets), 3), dtype=np.int64)
        rows[..., 0] = bases[:, 0] + bases[:, 1] * blocks[:, None] + offsets
        rows[..., 1] = lengths
        rows[..., 2] = bases[:, 2]
        return SegmentArray(rows.reshape(-1, 3))
