"""Greedy tokens equal transformers' generate on the whole model, alone and in company."""

from pathlib import Path

import pytest

from epd.engine.build import build_vision_runner
from epd.engine.families.registry import load_family
from tests.engine.harness import ImagePrompts, Reference, request, running, text_prompt

SIZES = [(56, 56), (100, 150), (168, 84), (60, 90)]


@pytest.fixture(scope="module")
def image_prompts(tiny_qwen2vl: Path) -> ImagePrompts:
    return ImagePrompts(load_family(tiny_qwen2vl), build_vision_runner(tiny_qwen2vl))


@pytest.mark.parametrize("native", [False, True])
@pytest.mark.parametrize("vision", [False, True])
def test_text_of_all_lengths_run_together(
    vision: bool, native: bool, tiny_llama: Path, tiny_qwen2vl: Path
) -> None:
    folder = tiny_qwen2vl if vision else tiny_llama
    reference = Reference(folder, vision)
    prompts = [text_prompt(n, seed=n) for n in (1, 2, 7, 8, 9, 47, 48, 49, 130, 300)]
    expected = [reference.generate_text(prompt, 40) for prompt in prompts]
    with running(folder, native=native) as client:
        requests = [request(f"r{i}", p, 40) for i, p in enumerate(prompts)]
        assert client.run(requests) == expected
        client.assert_idle()


@pytest.mark.parametrize("native", [False, True])
def test_zero_to_four_images_run_together(
    native: bool, tiny_qwen2vl: Path, image_prompts: ImagePrompts
) -> None:
    reference = Reference(tiny_qwen2vl, vision=True)
    pairs = [
        image_prompts.request(f"r{count}-{text}", SIZES[:count], text, seed=count, max_tokens=32)
        for count in range(5)
        for text in (1, 20)
    ]
    expected = [reference.generate(inputs, 32) for _, inputs in pairs]
    with running(tiny_qwen2vl, native=native) as client:
        assert client.run(r for r, _ in pairs) == expected
        client.assert_idle()


def test_a_prompt_of_more_than_a_thousand_tokens_in_chunks(
    tiny_qwen2vl: Path, image_prompts: ImagePrompts
) -> None:
    reference = Reference(tiny_qwen2vl, vision=True)
    made, inputs = image_prompts.request("long", SIZES, 260, max_tokens=32)
    assert len(made.token_ids) > 1024
    with running(tiny_qwen2vl, token_budget=100) as client:
        assert client.run([made]) == [reference.generate(inputs, 32)]
        assert client.engine.stats().steps > 1024 // 100


def test_the_context_limit_ends_the_output(tiny_llama: Path) -> None:
    reference = Reference(tiny_llama, vision=False)
    prompt = text_prompt(50)
    with running(tiny_llama, max_context=60) as client:
        assert client.run([request("r", prompt, 40)]) == [reference.generate_text(prompt, 10)]
