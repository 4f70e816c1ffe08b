"""Block lists become descriptors: as few as possible, and every byte exactly once."""

import dataclasses

from hypothesis import given
from hypothesis import strategies as st

from epd.engine.kv_layout import KvLayout, KvRegion
from epd.handover.block_runs import KvRoute, block_runs
from epd.handover.push_timing import exposed_ns, hidden_ns

SHAPE = KvLayout("m", 4, 8, 4, "float32", 2)


def laid_out(shape, address=0, num_blocks=16, first_layers=(0,), padding=0):
    """``shape`` with regions that begin at the given layers."""
    stride = shape.block_bytes + padding
    bounds = [*first_layers, shape.layer_count]
    regions = tuple(
        KvRegion(
            first,
            bounds[n + 1] - first,
            address + n * 10**6,
            (bounds[n + 1] - first) * num_blocks * stride,
            n,
            num_blocks * stride,
            stride,
        )
        for n, first in enumerate(first_layers)
    )
    return dataclasses.replace(shape, regions=regions)


def test_runs_join_only_where_both_sides_are_neighbours():
    runs = block_runs([3, 4, 5, 9, 10], [7, 8, 2, 3, 4])
    assert runs.tolist() == [[3, 7, 2], [5, 2, 1], [9, 3, 2]]
    assert block_runs([], []).tolist() == []


@given(st.permutations(range(12)), st.permutations(range(12)), st.integers(0, 12))
def test_runs_cover_every_pair_once_in_order(local, remote, count):
    pairs = [
        (here + step, there + step)
        for here, there, length in block_runs(local[:count], remote[:count]).tolist()
        for step in range(length)
    ]
    assert pairs == list(zip(local[:count], remote[:count], strict=True))


def test_a_dense_run_is_one_descriptor_at_the_right_place():
    here, there = laid_out(SHAPE), laid_out(SHAPE, address=5000, first_layers=(0, 2))
    (source,), (target,) = KvRoute(here, there).segments(
        block_runs([1, 2, 3], [4, 5, 6]), range(3, 4)
    )
    assert source.length == target.length == 3 * SHAPE.block_bytes
    assert source.address == (3 * 16 + 1) * SHAPE.block_bytes
    assert target.address == 5000 + 10**6 + (1 * 16 + 4) * SHAPE.block_bytes
    assert target.device_id == 1


def test_padding_between_blocks_is_never_sent():
    padded = laid_out(SHAPE, padding=64)
    route, runs = KvRoute(padded, laid_out(SHAPE)), block_runs(range(3), range(3))
    sources, _ = route.segments(runs, range(1))
    assert route.layer_bytes(3) == sources.byte_count
    assert [one.length for one in sources] == [SHAPE.block_bytes] * 3


def test_overlapping_writes_count_once_as_hidden():
    writes = [(0, 10), (5, 20), (30, 40), (90, 120)]
    assert hidden_ns(writes, 100) == 20 + 10 + 10
    assert exposed_ns(writes, 100) == 20
    assert exposed_ns(writes, 200) == 0
    assert hidden_ns([], 5) == exposed_ns([], 5) == 0
