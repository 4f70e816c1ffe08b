"""Videos whose time reaches behind the whole prompt: the answer stands where ``generate`` has it.

``get_rope_index`` returns a delta that would put the answer behind the video's last moment, but
``generate`` goes on from the last position of the prompt.
"""

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from epd.engine.build import build_vision_runner
from epd.engine.families.base import PixelInput
from epd.engine.families.registry import load_family
from epd.engine.requests import EngineRequest, Finished, PrefillDone, PromptImage, RequestMode
from tests.engine.harness import Reference, request, running, text_prompt
from tests.support.tiny_model import IM_START, VISION_END, VISION_START

#: 24 moments of 2x2 tokens; text goes on 2 positions after its first.
GRID = (24, 4, 4)
TOKENS = 40
#: A question so short that most of the video's time lies behind it; its answer has all TOKENS.
TEXT = text_prompt(1, seed=1)


class VideoPrompts:
    """Prompts of one video and some text, and what ``generate`` answers to them."""

    def __init__(self, folder: Path) -> None:
        self._family = load_family(folder)
        self._reference = Reference(folder, vision=True)
        patches = np.random.default_rng(4).normal(size=(int(np.prod(GRID)), 1176))
        self._pixels = PixelInput(patches.astype(np.float32), GRID)
        self._embeddings = tuple(build_vision_runner(folder).encode([self._pixels]))

    def request(self, name: str, text: list[int], emitted: list[int], **more: Any) -> EngineRequest:
        """``emitted`` are replayed."""
        plan = self._family.plan_video(GRID)
        return request(
            name,
            [IM_START, VISION_START, *plan.placeholder_ids, VISION_END, *text, *emitted],
            TOKENS,
            emitted_count=len(emitted),
            images=(PromptImage(2, plan.embedding_tokens, b"v" * 32, GRID),),
            embeddings=self._embeddings,
            position_delta=plan.position_delta,
            **more,
        )

    def expected(self, made: EngineRequest) -> list[int]:
        """The answer to a request that replays nothing."""
        assert not made.emitted_count
        assert self._family.video_token_id is not None
        ids = torch.tensor([made.token_ids])
        inputs = {
            "input_ids": ids,
            "attention_mask": torch.ones_like(ids),
            "mm_token_type_ids": 2 * ids.eq(self._family.video_token_id).int(),
            "pixel_values_videos": torch.from_numpy(self._pixels.patches),
            "video_grid_thw": torch.tensor([GRID]),
        }
        return self._reference.generate(inputs, TOKENS)


@pytest.fixture(scope="module")
def prompts(tiny_qwen2vl: Path) -> VideoPrompts:
    return VideoPrompts(tiny_qwen2vl)


@pytest.mark.parametrize("native", [False, True])
def test_answers_equal_generate_however_far_the_text_reaches(
    native: bool, tiny_qwen2vl: Path, prompts: VideoPrompts
) -> None:
    made = [prompts.request(f"r{n}", text_prompt(n, seed=n), []) for n in (1, 8, 20, 21, 40)]
    with running(tiny_qwen2vl, native=native) as client:
        assert client.run(made) == [prompts.expected(each) for each in made]
        client.assert_idle()


@pytest.mark.parametrize("prefix_cache", [False, True])
def test_a_replay_goes_on_where_the_first_attempt_was(
    prefix_cache: bool, tiny_qwen2vl: Path, prompts: VideoPrompts
) -> None:
    whole = prompts.request("whole", TEXT, [])
    expected = prompts.expected(whole)
    with running(tiny_qwen2vl, prefix_cache=prefix_cache) as client:
        assert client.run([whole]) == [expected]
        for count in (1, 23):
            replay = prompts.request(f"after-{count}", TEXT, expected[:count])
            assert client.run([replay]) == [expected[count:]]
            cached = client.wait(replay.request_id, Finished).cached_tokens
            assert cached == ((len(replay.token_ids) - 1) // 8 * 8 if prefix_cache else 0)
        client.assert_idle()


@pytest.mark.parametrize("emitted", [0, 9])
def test_decode_goes_on_from_prefills_blocks_without_knowing_the_grid(
    emitted: int, tiny_qwen2vl: Path, prompts: VideoPrompts
) -> None:
    expected = prompts.expected(prompts.request("whole", TEXT, []))
    made = prompts.request("p", TEXT, expected[:emitted], mode=RequestMode.PREFILL_ONLY)
    with running(tiny_qwen2vl, prefix_cache=False) as client:
        client.engine.submit(made)
        done = client.wait("p", PrefillDone)
        assert done.token_id == expected[emitted]
        arrived = dataclasses.replace(
            made,
            request_id="d",
            mode=RequestMode.PREFILLED,
            embeddings=(),
            images=tuple(dataclasses.replace(image, grid=None) for image in made.images),
            block_ids=client.hand_over(done, "p"),
            first_token=done.token_id,
        )
        assert client.run([arrived]) == [expected[emitted + 1 :]]


def test_the_answers_blocks_serve_the_next_turn(tiny_qwen2vl: Path, prompts: VideoPrompts) -> None:
    first = prompts.request("first", TEXT, [])
    answer = prompts.expected(first)
    turn = prompts.request("turn", [*TEXT, *answer, *text_prompt(9, seed=8)], [])
    with running(tiny_qwen2vl) as client:
        assert client.run([first]) == [answer]
        assert client.run([turn]) == [prompts.expected(turn)]
        # The answer's last token has no KV: nothing was drawn after it.
        computed = len(first.token_ids) + len(answer) - 1
        assert client.wait("turn", Finished).cached_tokens == computed // 8 * 8
        client.assert_idle()
