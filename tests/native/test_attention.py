"""Native paged attention equals a float64 reference and does not depend on batching."""

from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from epd.engine.native.attention import NativeAttention
from epd.engine.native.library import NativeLibrary
from tests.native.reference import Step, make_step, reference_attention

SCALE = 0.125


def attend(library: NativeLibrary, step: Step) -> torch.Tensor:
    attention = NativeAttention(library, step.metadata)
    attention.write(step.layer_kv, step.key, step.value)
    return attention.attend(step.query, step.layer_kv, SCALE)


def check(library: NativeLibrary, step: Step) -> None:
    output = attend(library, step)
    torch.testing.assert_close(
        output.double(), reference_attention(step, SCALE), rtol=1e-5, atol=1e-5
    )


def test_a_single_first_token_attends_to_itself(library: NativeLibrary) -> None:
    step = make_step(((0, 1),))
    torch.testing.assert_close(attend(library, step), step.value.repeat_interleave(2, dim=1))


@pytest.mark.parametrize("context", [15, 16, 17, 31, 32, 33])
@pytest.mark.parametrize("new", [1, 2, 15])
def test_lengths_around_block_borders(library: NativeLibrary, context: int, new: int) -> None:
    check(library, make_step(((context - new, new),), block_size=16))


@pytest.mark.parametrize("head_dim", [32, 48, 64, 80, 128])
@pytest.mark.parametrize(("heads", "kv_heads"), [(3, 3), (9, 3), (8, 1), (32, 1), (6, 2)])
def test_head_sizes_and_groups(
    library: NativeLibrary, head_dim: int, heads: int, kv_heads: int
) -> None:
    runs = ((40, 1), (0, 21), (5, 7))
    check(library, make_step(runs, heads=heads, kv_heads=kv_heads, head_dim=head_dim))


@settings(max_examples=20, deadline=None)
@given(
    runs=st.lists(st.tuples(st.integers(0, 70), st.integers(1, 40)), min_size=1, max_size=5),
    shape=st.sampled_from([(1, 1), (4, 2), (9, 3), (7, 1)]),
    head_dim=st.sampled_from([16, 32, 64]),
    block_size=st.sampled_from([1, 4, 8, 16, 24, 32, 64]),
    seed=st.integers(0, 2**31),
)
def test_any_step_equals_the_float64_reference(
    library: NativeLibrary,
    runs: list[tuple[int, int]],
    shape: tuple[int, int],
    head_dim: int,
    block_size: int,
    seed: int,
) -> None:
    check(library, make_step(tuple(runs), *shape, head_dim, block_size, seed))


def test_the_write_touches_only_the_slots_of_the_step(library: NativeLibrary) -> None:
    step = make_step(((3, 1), (0, 20)))
    before = step.layer_kv.clone()
    NativeAttention(library, step.metadata).write(step.layer_kv, step.key, step.value)
    blocks, offsets = step.metadata.slot_blocks, step.metadata.slot_offsets
    assert torch.equal(step.layer_kv[blocks, 0, :, offsets], step.key)
    assert torch.equal(step.layer_kv[blocks, 1, :, offsets], step.value)
    step.layer_kv[blocks, :, :, offsets] = before[blocks, :, :, offsets]
    assert torch.equal(step.layer_kv.nan_to_num(7.0), before.nan_to_num(7.0))


def test_a_token_s_output_is_bitwise_the_same_in_one_chunk_and_in_several(
    library: NativeLibrary,
) -> None:
    step = make_step(((0, 50),), heads=9, kv_heads=3)
    whole = attend(library, step)
    for start, end in ((0, 7), (7, 8), (8, 33), (33, 50)):
        chunk = replace(
            step.metadata,
            context_lens=torch.tensor([end], dtype=torch.int32),
            query_starts=torch.tensor([0, end - start], dtype=torch.int32),
        )
        attention = NativeAttention(library, chunk)
        assert torch.equal(
            attention.attend(step.query[start:end], step.layer_kv, SCALE), whole[start:end]
        )


def test_a_sequence_s_output_is_bitwise_the_same_alone_and_in_a_batch(
    library: NativeLibrary,
) -> None:
    step = make_step(((40, 1), (3, 1), (0, 33), (9, 5)), heads=9, kv_heads=3)
    together = attend(library, step)
    starts = step.metadata.query_starts_list
    for row, (start, end) in enumerate(pairwise(starts)):
        alone = replace(
            step.metadata,
            block_tables=step.metadata.block_tables[row : row + 1],
            context_lens=step.metadata.context_lens[row : row + 1],
            query_starts=torch.tensor([0, end - start], dtype=torch.int32),
            context_lens_list=step.metadata.context_lens_list[row : row + 1],
        )
        attention = NativeAttention(library, alone)
        assert torch.equal(
            attention.attend(step.query[start:end], step.layer_kv, SCALE), together[start:end]
        )


def test_two_threads_give_the_same_bits(library: NativeLibrary) -> None:
    step = make_step(((40, 1), (0, 33), (9, 5)), heads=9, kv_heads=3)
    attention = NativeAttention(NativeLibrary(threads=2, path=library.path), step.metadata)
    output = attend(library, step)
    assert torch.equal(attention.attend(step.query, step.layer_kv, SCALE), output)


def test_scores_of_any_size_stay_finite(library: NativeLibrary) -> None:
    step = make_step(((60, 3),))
    step.query.mul_(1e4)
    check(library, step)
