"""A prompt is computed up to the first image that is not there, and no token differs for it."""

import dataclasses
from pathlib import Path

import pytest
import torch

from epd.engine.families.registry import load_family
from epd.engine.image_gate import ImageGate
from epd.engine.requests import LayerProgress, PrefillDone, PromptImage, RequestMode
from epd.engine.vision_runner import VisionRunner
from tests.engine.harness import ImagePrompts, Reference, eventually, running

SIZES = [(112, 56), (84, 84), (56, 140)]


@pytest.fixture(scope="module")
def prompts(tiny_qwen2vl: Path) -> ImagePrompts:
    family, cpu = load_family(tiny_qwen2vl), torch.device("cpu")
    return ImagePrompts(family, VisionRunner(family, family.load_vision(torch.float32, cpu), cpu))


def test_tokens_before_the_first_closed_image_may_be_computed() -> None:
    images = [PromptImage(10, 5, b""), PromptImage(20, 5, b"")]
    gate = ImageGate(images, {0, 1})
    assert gate.end(0, 100) == 10
    assert gate.end(12, 100) == 12  # within an image that is not there
    assert gate.end(15, 100) == 20  # the first one's KV came out of the prefix cache
    gate.open(1)
    assert gate.end(0, 100) == 10
    gate.open(0)
    assert gate.end(0, 100) == 100
    assert gate.end(0, 7) == 7


def test_embeddings_that_come_late_give_the_same_tokens(
    tiny_qwen2vl: Path, prompts: ImagePrompts
) -> None:
    computed: list[int] = []

    def hook(layer: int, progress: list[LayerProgress]) -> None:
        computed.append(progress[0].computed_after)

    made, inputs = prompts.request("late", SIZES, text=30, mode=RequestMode.PREFILL_ONLY)
    expected = Reference(tiny_qwen2vl, vision=True).generate(inputs, 1)
    late = tuple(torch.full_like(one, float("nan")) for one in made.embeddings)
    gate = ImageGate(made.images, range(len(SIZES)))
    request = dataclasses.replace(made, embeddings=late, gate=gate)
    with running(tiny_qwen2vl, hook) as client:
        client.engine.submit(request)
        for position in (1, 0, 2):  # not in order
            first = min(p for p in range(3) if late[p].isnan().any())
            before = made.images[first].offset
            eventually(lambda: bool(computed) or before < 8)  # noqa: B023
            assert all(end <= before for end in computed)
            late[position].copy_(made.embeddings[position])
            gate.open(position)
            client.engine.proceed()
        done = client.wait("late", PrefillDone)
        assert [done.token_id] == expected
        client.engine.release("late")
        eventually(lambda: client.engine.stats().held_requests == 0)
        client.assert_idle()


def test_a_request_that_is_held_back_blocks_nobody_and_can_be_cancelled(
    tiny_qwen2vl: Path, prompts: ImagePrompts
) -> None:
    made, _ = prompts.request("held", SIZES, text=10)
    held = dataclasses.replace(made, gate=ImageGate(made.images, {0}))
    other, inputs = prompts.request("other", SIZES[:1], text=10, seed=5, max_tokens=4)
    with running(tiny_qwen2vl) as client:
        client.engine.submit(held)
        assert client.run([other]) == [Reference(tiny_qwen2vl, vision=True).generate(inputs, 4)]
        client.engine.cancel("held")
        eventually(lambda: client.engine.stats().running_requests == 0)
        client.assert_idle()
