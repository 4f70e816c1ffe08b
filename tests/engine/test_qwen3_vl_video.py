"""Qwen3-VL's videos: a vision segment per temporal patch, its time in text before it."""

import dataclasses
import random
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoTokenizer, Qwen3VLForConditionalGeneration

from epd.engine.build import build_vision_runner
from epd.engine.families.base import ModelFamily, PixelInput
from epd.engine.families.registry import load_family
from epd.engine.requests import EngineRequest, PrefillDone, PromptImage, RequestMode
from epd.errors import InvalidRequestError
from tests.engine.harness import Reference, request, running
from tests.support.questions import make_video
from tests.support.tiny_model import IM_START, IMAGE_PAD, VISION_END, VISION_START
from tests.support.video_reference import spelled_video

TOKENS = 24
#: Frames, width, height.
SIZES = [(2, 64, 64), (5, 100, 150), (12, 90, 70)]
#: True: a video.
VISUALS = st.tuples(st.booleans(), st.integers(1, 6), st.integers(40, 120), st.integers(40, 120))


@pytest.fixture(scope="module")
def family(tiny_qwen3vl: Path) -> ModelFamily:
    return load_family(tiny_qwen3vl)


@pytest.fixture(scope="module")
def rope(tiny_qwen3vl: Path):
    return Qwen3VLForConditionalGeneration.from_pretrained(tiny_qwen3vl).model.get_rope_index


@settings(deadline=None, max_examples=25)
@given(
    parts=st.lists(st.tuples(VISUALS, st.integers(1, 9)), min_size=1, max_size=4),
    cut=st.floats(0, 1),
)
def test_positions_of_mixed_images_and_videos_equal_get_rope_index(family, rope, parts, cut):
    tokens, placed = [65], []
    for (is_video, patches, width, height), text in parts:
        times = [0.7 * n for n in range(2 * patches)]
        plan = (
            family.plan_video_from_size(times, width, height)
            if is_video
            else family.plan_from_size(width, height)
        )
        placed.append(
            (is_video, PromptImage(len(tokens), len(plan.placeholder_ids), b"", plan.grid), plan)
        )
        tokens += [*plan.placeholder_ids, *[65] * text]
    grids = {
        kind: torch.tensor([plan.grid for is_video, _, plan in placed if is_video == kind])
        for kind in {is_video for is_video, _, _ in placed}
    }
    ids = torch.tensor([tokens])
    types = (ids == family.embedding_token_id).int() + 2 * (ids == family.video_token_id).int()
    expected, delta = rope(ids, types, grids.get(False), grids.get(True))
    images = tuple(image for _, image, _ in placed)
    total = sum(plan.position_delta for _, _, plan in placed)
    assert total == delta.item()
    start = int(cut * len(tokens))
    for end in range(start, len(tokens) + 1):
        got = family.positions(tokens[:end], images, total, start, end)
        np.testing.assert_array_equal(got, expected[:, 0, start:end].numpy())
    after = family.positions(tokens, (), total, len(tokens), len(tokens) + 1)
    assert after[0, 0] == expected[0, 0, -1] + 1


@pytest.mark.parametrize("frames", [2, 3, 26])
def test_a_videos_place_is_spelled_as_transformers_processor_does(
    family: ModelFamily, tiny_qwen3vl: Path, frames: int
) -> None:
    video = make_video(random.Random(1), frames)
    plan = family.plan_video_from_size(video.timestamps_s, 100, 70)
    text = spelled_video(video, plan.grid)
    assert text.startswith("<0.2 seconds><|vision_start|><|video_pad|>")
    tokenizer = AutoTokenizer.from_pretrained(tiny_qwen3vl)
    assert list(plan.placeholder_ids) == tokenizer.encode(text, add_special_tokens=False)
    assert plan.embedding_tokens == plan.placeholder_ids.count(family.video_token_id)
    assert family.plan_placed(plan.grid, plan.placeholder_ids) == plan


def test_a_video_of_one_frame_is_refused_as_transformers_does(family: ModelFamily) -> None:
    with pytest.raises(InvalidRequestError, match="at least 2"):
        family.plan_video_from_size((0.0,), 64, 64)


class VideoPrompts:
    """Prompts of one video and some text, and what ``generate`` answers to them."""

    def __init__(self, folder: Path) -> None:
        self._family = load_family(folder)
        self._reference = Reference(folder, vision=True)
        self._vision = build_vision_runner(folder)

    def request(self, name: str, size: tuple[int, int, int], **more) -> EngineRequest:
        frames, width, height = size
        times = [0.4 * n for n in range(frames)]
        plan = self._family.plan_video_from_size(times, width, height)
        return request(
            name,
            [IM_START, VISION_START, *plan.placeholder_ids, VISION_END, *range(65, 75)],
            TOKENS,
            images=(PromptImage(2, len(plan.placeholder_ids), name.encode() * 32, plan.grid),),
            embeddings=tuple(self._vision.encode([self._pixels(plan.grid)])),
            position_delta=plan.position_delta,
            **more,
        )

    def expected(self, made: EngineRequest) -> list[int]:
        """The answer."""
        assert self._family.video_token_id is not None
        ids = torch.tensor([made.token_ids])
        grid = made.images[0].grid
        inputs = {
            "input_ids": ids,
            "attention_mask": torch.ones_like(ids),
            "mm_token_type_ids": 2 * ids.eq(self._family.video_token_id).int(),
            "pixel_values_videos": torch.from_numpy(self._pixels(grid).patches),
            "video_grid_thw": torch.tensor([grid]),
        }
        return self._reference.generate(inputs, TOKENS)

    def _pixels(self, grid) -> PixelInput:
        patches = np.random.default_rng(4).normal(size=(int(np.prod(grid)), 3 * 2 * 16 * 16))
        return PixelInput(patches.astype(np.float32), grid)


@pytest.fixture(scope="module")
def prompts(tiny_qwen3vl: Path) -> VideoPrompts:
    return VideoPrompts(tiny_qwen3vl)


@pytest.mark.parametrize(("native", "budget"), [(False, 100), (True, 19)])
def test_answers_equal_generate_together_in_chunks_and_out_of_the_prefix_cache(
    native: bool, budget: int, tiny_qwen3vl: Path, prompts: VideoPrompts
) -> None:
    made = [prompts.request(str(n), size) for n, size in enumerate(SIZES)]
    expected = [prompts.expected(one) for one in made]
    assert len({tuple(one) for one in expected}) == len(SIZES)
    with running(tiny_qwen3vl, native=native, token_budget=budget) as client:
        assert client.run(made) == expected
        again = dataclasses.replace(made[1], request_id="again")
        assert client.run([again]) == [expected[1]]
        client.assert_idle()


def test_decode_goes_on_from_prefills_blocks_without_knowing_the_grid(
    tiny_qwen3vl: Path, prompts: VideoPrompts
) -> None:
    made = prompts.request("p", SIZES[1], mode=RequestMode.PREFILL_ONLY)
    expected = prompts.expected(made)
    with running(tiny_qwen3vl, prefix_cache=False) as client:
        client.engine.submit(made)
        done = client.wait("p", PrefillDone)
        arrived = dataclasses.replace(
            made,
            request_id="d",
            mode=RequestMode.PREFILLED,
            embeddings=(),
            images=tuple(dataclasses.replace(image, grid=None) for image in made.images),
            block_ids=client.hand_over(done, "p"),
            first_token=done.token_id,
        )
        assert client.run([arrived]) == [expected[1:]]


def test_a_run_that_is_no_videos_place_never_reaches_the_engine(
    tiny_qwen3vl: Path, prompts: VideoPrompts
) -> None:
    made = prompts.request("p", SIZES[1])
    image = made.images[0]
    after = image.offset + image.length
    pad = made.token_ids.index(VISION_START, 2)
    spoilt = {
        "a time became a row": (2, IMAGE_PAD),
        "a row became text": (pad + 1, 65),
        "an end is missing": (after - 1, 65),
        "a segment is missing": (pad, 65),
    }
    with running(tiny_qwen3vl) as client:
        for name, (place, token) in spoilt.items():
            tokens = list(made.token_ids)
            tokens[place] = token
            with pytest.raises(InvalidRequestError):
                client.engine.submit(
                    dataclasses.replace(made, request_id=name, token_ids=tuple(tokens))
                )
        client.assert_idle()
