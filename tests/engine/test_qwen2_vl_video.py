"""Positions of videos equal transformers', wherever a step is cut."""

from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import Qwen2VLForConditionalGeneration

from epd.engine.families.registry import load_family
from epd.engine.requests import PromptImage

SIDES = st.integers(1, 5).map(lambda n: 2 * n)
#: True: a video.
VISUALS = st.tuples(st.booleans(), st.integers(1, 4), SIDES, SIDES)


@settings(deadline=None, max_examples=50)
@given(
    parts=st.lists(st.tuples(VISUALS, st.integers(1, 9)), min_size=1, max_size=4),
    cut=st.tuples(st.floats(0, 1), st.floats(0, 1)),
)
def test_positions_of_mixed_images_and_videos_equal_get_rope_index(family, rope, parts, cut):
    tokens, types, placed = [65], [0], []
    for (is_video, temporal, height, width), text in parts:
        grid = (temporal if is_video else 1, height, width)
        plan = family.plan_video(grid) if is_video else family.plan_image(grid)
        placed.append((is_video, PromptImage(len(tokens), plan.embedding_tokens, b"", grid)))
        tokens += [*plan.placeholder_ids, *[65] * text]
        types += [1 + is_video] * plan.embedding_tokens + [0] * text
    grids = {
        kind: torch.tensor([image.grid for is_video, image in placed if is_video == kind])
        for kind in {is_video for is_video, _ in placed}
    }
    expected, _ = rope(
        torch.tensor([tokens]), torch.tensor([types]), grids.get(False), grids.get(True)
    )
    images = tuple(image for _, image in placed)
    total = sum(family.plan_placed(i.grid, tokens[i.offset :]).position_delta for i in images)
    start, end = sorted(int(c * len(tokens)) for c in cut)
    got = family.positions(tokens, images, total, start, end)
    np.testing.assert_array_equal(got, expected[:, 0, start:end].numpy())
    after = family.positions(tokens, (), total, len(tokens), len(tokens) + 1)
    assert after[0, 0] == expected[0, 0, -1] + 1


@pytest.fixture(scope="module")
def family(tiny_qwen2vl: Path):
    return load_family(tiny_qwen2vl)


@pytest.fixture(scope="module")
def rope(tiny_qwen2vl: Path):
    return Qwen2VLForConditionalGeneration.from_pretrained(tiny_qwen2vl).model.get_rope_index
