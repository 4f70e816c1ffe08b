"""Blocks: preemption, waiting, holding and the prefix cache."""

import dataclasses
from pathlib import Path

import pytest

from epd.engine.build import build_vision_runner
from epd.engine.families.registry import load_family
from epd.engine.requests import (
    Finished,
    Preempted,
    PrefillDone,
    RequestMode,
)
from epd.errors import (
    DuplicateRequestError,
)
from tests.engine.harness import (
    LAST,
    ImagePrompts,
    Reference,
    eventually,
    request,
    running,
    text_prompt,
)

PROMPT = text_prompt(50)


@pytest.fixture(scope="module")
def reference(tiny_llama: Path) -> Reference:
    return Reference(tiny_llama, vision=False)


@pytest.fixture(scope="module")
def image_prompts(tiny_qwen2vl: Path) -> ImagePrompts:
    return ImagePrompts(load_family(tiny_qwen2vl), build_vision_runner(tiny_qwen2vl))


def test_preempted_requests_replay_to_the_same_tokens_and_the_oldest_is_spared(
    tiny_llama: Path, reference: Reference
) -> None:
    prompts = [text_prompt(24, seed=i) for i in range(4)]
    expected = [reference.generate_text(prompt, 40) for prompt in prompts]
    emitted: list[list[int]] = [[] for _ in prompts]
    attempt = dict.fromkeys(range(4), 0)
    with running(tiny_llama, num_blocks=16, headroom_blocks=0, prefix_cache=False) as client:

        def submit(index: int) -> None:
            made = request(f"r{index}.{attempt[index]}", [*prompts[index], *emitted[index]], 40)
            client.engine.submit(dataclasses.replace(made, emitted_count=len(emitted[index])))

        everything = client.engine.pool.allocate(16)
        assert everything is not None
        for index in range(4):
            submit(index)
        client.engine.pool.free(everything)  # now all begin together
        open_requests = {0, 1, 2, 3}
        while open_requests:
            for index in sorted(open_requests):
                name = f"r{index}.{attempt[index]}"
                last = client.wait(name, *LAST)
                emitted[index] += client.tokens(name)
                if isinstance(last, Preempted):
                    assert name != "r0.0", "the oldest lost its blocks"
                    attempt[index] += 1
                    submit(index)
                else:
                    open_requests.discard(index)
        assert emitted == expected
        assert client.engine.stats().preemptions == sum(attempt.values()) > 0
        client.assert_idle()


def test_a_request_waits_for_blocks_that_somebody_else_holds(tiny_llama: Path) -> None:
    with running(tiny_llama, num_blocks=8) as client:
        held = client.engine.pool.allocate(4)
        assert held is not None
        client.engine.submit(request("r", PROMPT, 3))
        eventually(lambda: client.engine.stats().waiting_tokens == len(PROMPT))
        assert client.engine.stats().waiting_requests == 1
        client.engine.pool.free(held)
        client.wait("r", Finished)
        client.assert_idle()


def test_a_prefilled_only_request_keeps_its_blocks_until_released(tiny_llama: Path) -> None:
    with running(tiny_llama, prefix_cache=False) as client:
        client.engine.submit(request("r", PROMPT, mode=RequestMode.PREFILL_ONLY))
        done = client.wait("r", PrefillDone)
        stats = client.engine.stats()
        assert (stats.held_requests, stats.running_requests) == (1, 0)
        assert stats.total_blocks - stats.free_blocks == len(done.block_ids) == 7
        client.engine.cancel("r")
        with pytest.raises(DuplicateRequestError):
            client.engine.submit(request("r", PROMPT))
        client.engine.release("r")
        client.engine.release("r")
        client.engine.release("unknown")
        eventually(lambda: client.engine.stats().held_requests == 0)
        client.assert_idle()


def test_the_prefix_cache_tells_images_apart_and_finds_equal_ones(
    tiny_qwen2vl: Path, image_prompts: ImagePrompts
) -> None:
    reference = Reference(tiny_qwen2vl, vision=True)
    size = [(100, 150)]
    cat, cat_inputs = image_prompts.request("cat", size, 30, seed=1, max_tokens=12)
    dog, dog_inputs = image_prompts.request("dog", size, 30, seed=2, max_tokens=12)
    assert list(cat.token_ids) != list(dog.token_ids)
    dog = dataclasses.replace(dog, token_ids=cat.token_ids)  # same text, other picture
    dog_inputs["input_ids"] = cat_inputs["input_ids"]
    again = dataclasses.replace(cat, request_id="again")
    with running(tiny_qwen2vl) as client:
        tokens = [client.run([r])[0] for r in (cat, dog, again)]
        expected = [reference.generate(i, 12) for i in (cat_inputs, dog_inputs, cat_inputs)]
        assert tokens == expected
        assert tokens[0] != tokens[1]
        assert client.wait("dog", Finished).cached_tokens == 0
        cached = client.wait("again", Finished).cached_tokens
        assert cached == (len(cat.token_ids) - 1) // 8 * 8
        stats = client.engine.stats()
        assert stats.prefix_cache_hits == cached
        assert stats.prompt_tokens == 3 * len(cat.token_ids) - cached
        client.assert_idle()
