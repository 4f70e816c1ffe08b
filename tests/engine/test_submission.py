"""What can never run is refused at once, with the reason."""

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from epd.engine.build import build_vision_runner
from epd.engine.families.registry import load_family
from epd.engine.requests import (
    Finished,
    NewTokens,
    RequestMode,
    SamplingParams,
)
from epd.errors import (
    DuplicateRequestError,
    InvalidRequestError,
    ResourceExhaustedError,
    UnsupportedFeatureError,
)
from tests.engine.harness import (
    ImagePrompts,
    request,
    running,
    text_prompt,
)

PROMPT = text_prompt(50)
ENDLESS = SamplingParams(max_tokens=3000, ignore_eos=True)


@pytest.fixture(scope="module")
def image_prompts(tiny_qwen2vl: Path) -> ImagePrompts:
    return ImagePrompts(load_family(tiny_qwen2vl), build_vision_runner(tiny_qwen2vl))


def test_a_full_queue_refuses_and_a_live_id_is_not_taken_twice(tiny_llama: Path) -> None:
    with running(tiny_llama, max_running=1, max_waiting=2) as client:
        client.engine.submit(request("r0", PROMPT, sampling=ENDLESS))
        client.wait("r0", NewTokens)
        client.engine.submit(request("r1", PROMPT, 2))
        client.engine.submit(request("r2", PROMPT, 2))
        with pytest.raises(ResourceExhaustedError):
            client.engine.submit(request("r3", PROMPT))
        with pytest.raises(DuplicateRequestError):
            client.engine.submit(request("r0", PROMPT))
        client.engine.cancel("r0")
        client.wait("r1", Finished)
        client.wait("r2", Finished)
        client.run([request("r3", PROMPT, 2)])


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"token_ids": []}, "empty"),
        ({"token_ids": [1] * 200}, "200 tokens.* 200"),
        ({"token_ids": [1, 263]}, "263"),
        ({"token_ids": [-1]}, "-1"),
        ({"emitted_count": 50}, "output"),
        ({"emitted_count": 32}, "max_tokens"),
        ({"sampling": SamplingParams(temperature=float("nan"))}, "temperature"),
        ({"sampling": SamplingParams(min_tokens=2, stop_token_ids=(263,))}, "stop token 263"),
        (
            {"sampling": SamplingParams(min_tokens=2, stop_token_ids=tuple(range(263)))},
            "every token ends",
        ),
        ({"block_ids": (1,)}, "prefilled"),
        ({"mode": RequestMode.PREFILLED, "block_ids": (1,), "first_token": 1}, "7 blocks, 1"),
        ({"mode": RequestMode.PREFILLED, "block_ids": tuple(range(7))}, "first_token"),
        (
            {"mode": RequestMode.PREFILLED, "block_ids": tuple(range(7)), "first_token": 258},
            "already ends",
        ),
    ],
)
def test_what_can_never_run_is_refused_with_the_reason(
    tiny_llama: Path, fields: dict[str, Any], message: str
) -> None:
    made = dataclasses.replace(request("r", PROMPT), **fields)
    with running(tiny_llama, max_context=200) as client:
        with pytest.raises(InvalidRequestError, match=message):
            client.engine.submit(made)
        client.assert_idle()


def test_images_that_do_not_fit_their_prompt_are_refused(
    tiny_qwen2vl: Path, tiny_llama: Path, image_prompts: ImagePrompts
) -> None:
    made, _ = image_prompts.request("r", [(56, 56), (60, 90)], 10)
    first, second = made.images
    wrong: list[dict[str, Any]] = [
        {"embeddings": made.embeddings[:1]},
        {"embeddings": made.embeddings[::-1]},
        {"position_delta": made.position_delta + 1},
        {"images": (second, first)},
        {"images": (dataclasses.replace(first, offset=3), second)},
        {"images": (dataclasses.replace(first, grid=None), second)},
        {"images": (dataclasses.replace(first, grid=(0, 0, 0)), second)},
        {"images": (dataclasses.replace(first, grid=(2**32, 2**32, 2**32)), second)},
        # As many placeholders as the true grid, but no image of that shape is there.
        {"images": (dataclasses.replace(first, grid=(first.length * 4, 1, 1)), second)},
        {"token_ids": made.token_ids[: second.offset + 1]},
    ]
    with running(tiny_qwen2vl) as client:
        for fields in wrong:
            with pytest.raises(InvalidRequestError):
                client.engine.submit(dataclasses.replace(made, **fields))
        client.run([made])
    with running(tiny_llama) as client, pytest.raises(UnsupportedFeatureError):
        client.engine.submit(made)
