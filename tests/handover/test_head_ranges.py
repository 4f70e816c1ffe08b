"""Every head of every reading rank comes from exactly one writing rank, wherever degrees differ."""

import dataclasses

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from epd.engine.head_ranges import rank_heads, writers_of, written_heads
from epd.engine.kv_layout import KvLayout, check_compatible
from epd.errors import LayoutMismatchError
from epd.handover.block_runs import KvRoute, block_runs, block_slices
from tests.handover.ranks import of_rank
from tests.handover.test_block_runs import laid_out

SHAPE = KvLayout("m", 4, 8, 4, "float32", 2)
HEADS = st.sampled_from([1, 2, 4, 8])
DEGREES = st.sampled_from([1, 2, 4, 8, 16])


@given(HEADS, DEGREES)
def test_ranks_hold_all_heads_and_equal_shares(heads, degree):
    held = [rank_heads(heads, degree, rank) for rank in range(degree)]
    assert {head for one in held for head in one} == set(range(heads))
    assert {len(one) for one in held} == {max(1, heads // degree)}


@given(HEADS, DEGREES, DEGREES, st.integers(0, 15))
def test_each_head_of_a_reader_has_one_writer(heads, writers, readers, rank):
    reader = (readers, rank % readers)
    plan = writers_of(heads, writers, reader)
    sent = sorted(head for one in plan.values() for head in one)
    assert sent == list(rank_heads(heads, *reader))
    assert all(set(one) <= set(rank_heads(heads, writers, w)) for w, one in plan.items())


def test_copies_share_the_work():
    """A latent on four ranks, read by four: each writes once. Read by one: one writes."""
    assert [list(writers_of(1, 4, (4, rank))) for rank in range(4)] == [[0], [1], [2], [3]]
    assert writers_of(1, 4, (1, 0)) == {0: range(1)}
    assert written_heads(1, (4, 3), (1, 0)) == range(0)


@pytest.mark.parametrize(("heads", "degree", "rank"), [(3, 2, 0), (4, 3, 0), (2, 2, 2), (2, 0, 0)])
def test_what_cannot_be_shared_out_is_refused(heads, degree, rank):
    with pytest.raises(LayoutMismatchError):
        rank_heads(heads, degree, rank)


def layouts(shape, degree):
    return [of_rank(shape, degree, rank) for rank in range(degree)]


@pytest.mark.parametrize("planes", [1, 2])
@pytest.mark.parametrize(
    ("heads", "writers", "readers"), [(8, 1, 2), (8, 2, 1), (8, 4, 2), (2, 4, 1)]
)
def test_slices_of_all_writers_make_a_readers_block_complete(heads, writers, readers, planes):
    shape = dataclasses.replace(SHAPE, kv_head_count=heads, planes=planes)
    data = np.arange(shape.block_bytes // 4, dtype=np.float32).reshape(planes, heads, 2, 4)

    def block(layout):
        first = layout.head_start
        return data[:, first : first + layout.heads_held].tobytes()

    for reader in layouts(shape, readers):
        arrived = bytearray(reader.block_bytes)
        times = bytearray(reader.block_bytes)
        for writer in layouts(shape, writers):
            for one in block_slices(writer, reader):
                source = block(writer)[one.local_offset :][: one.length]
                arrived[one.remote_offset : one.remote_offset + one.length] = source
                for position in range(one.remote_offset, one.remote_offset + one.length):
                    times[position] += 1
        assert bytes(arrived) == block(reader)
        assert set(times) == {1}, "a byte is written once"


def test_a_head_slice_is_two_descriptors_per_block_never_one_per_slot():
    part = laid_out(of_rank(SHAPE, 2, 1))
    sources, targets = KvRoute(part, laid_out(SHAPE)).segments(block_runs([0, 1], [2, 3]), range(1))
    assert len(sources) == len(targets) == 4


def test_ranks_without_common_heads_exchange_nothing():
    assert block_slices(of_rank(SHAPE, 2, 0), of_rank(SHAPE, 2, 1)) == ()


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"head_count": 4}, "rank 0 of 1 holds 8 of 8 KV heads from 0 on"),
        (
            {"tp_degree": 2, "tp_rank": 1, "head_count": 4},
            "rank 1 of 2 holds 4 of 8 KV heads from 4",
        ),
        ({"tp_degree": 3}, "cannot be shared out evenly to 3 ranks"),
        ({"tp_degree": 2, "tp_rank": 2}, "no tensor-parallel rank 2 of 2"),
        ({"planes": 1}, "planes: 2 here, 1 there"),
        ({"tp_degree": 2, "head_count": 4}, "degrees 1 here and 2 there are not supported yet"),
    ],
)
def test_a_layout_of_an_impossible_or_unsupported_rank_is_refused(change, text):
    with pytest.raises(LayoutMismatchError, match=text):
        check_compatible(SHAPE, dataclasses.replace(SHAPE, **change))
