"""Models with several feature levels per image token (DeepStack) answer as transformers does."""

import dataclasses
from pathlib import Path

import pytest
import torch

from epd.engine.build import build_vision_runner
from epd.engine.families.registry import load_family
from epd.engine.vision_runner import VisionRunner
from epd.errors import InvalidRequestError
from tests.engine.harness import ImagePrompts, Reference, running

SIZES = [(64, 64), (100, 150), (190, 90)]


@pytest.fixture(scope="module")
def vision(tiny_qwen3vl: Path) -> VisionRunner:
    return build_vision_runner(tiny_qwen3vl)


@pytest.fixture(scope="module")
def prompts(tiny_qwen3vl: Path, vision: VisionRunner) -> ImagePrompts:
    return ImagePrompts(load_family(tiny_qwen3vl), vision)


@pytest.mark.parametrize("native", [False, True])
@pytest.mark.parametrize("budget", [100, 19])
def test_answers_equal_generate_together_and_in_chunks(
    native: bool, budget: int, tiny_qwen3vl: Path, prompts: ImagePrompts
) -> None:
    reference = Reference(tiny_qwen3vl, vision=True)
    pairs = [
        prompts.request(f"r{count}-{text}", SIZES[:count], text, seed=count, max_tokens=24)
        for count in range(4)
        for text in (1, 20)
    ]
    expected = [reference.generate(inputs, 24) for _, inputs in pairs]
    with running(tiny_qwen3vl, native=native, token_budget=budget) as client:
        assert client.run(made for made, _ in pairs) == expected
        # The levels are added to what prefix blocks are made of, too.
        again = prompts.request("again", SIZES[:3], 20, seed=3, max_tokens=24)[0]
        assert client.run([again]) == [expected[-1]]
        client.assert_idle()


def test_an_embedding_without_its_levels_or_with_others_is_not_the_same(
    tiny_qwen3vl: Path, prompts: ImagePrompts
) -> None:
    made, inputs = prompts.request("r", SIZES[:1], 8, max_tokens=24)
    expected = Reference(tiny_qwen3vl, vision=True).generate(inputs, 24)
    (embedding,) = made.embeddings
    family = load_family(tiny_qwen3vl)
    assert embedding.shape[1] == family.embedding_features == 3 * family.hidden_size
    with running(tiny_qwen3vl, prefix_cache=False) as client:
        spoilt = embedding.clone()
        spoilt[:, family.hidden_size :] = 0
        (answer,) = client.run([_with(made, spoilt, "zero")])
        assert answer != expected
        with pytest.raises(InvalidRequestError, match="an embedding is"):
            client.engine.submit(_with(made, embedding[:, : family.hidden_size], "cut"))


def _with(made, embedding: torch.Tensor, request_id: str):

    return dataclasses.replace(made, embeddings=(embedding,), request_id=request_id)
