"""What the engine promises its callers, on a real thread and a real (tiny) model."""

import dataclasses
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from epd.engine.build import build_vision_runner
from epd.engine.engine import Engine
from epd.engine.families.registry import load_family
from epd.engine.requests import (
    Admitted,
    EngineRequest,
    Failed,
    Finished,
    FinishReason,
    NewTokens,
    Preempted,
    PrefillDone,
    RequestMode,
    SamplingParams,
)
from epd.errors import (
    DuplicateRequestError,
    InternalError,
    InvalidRequestError,
    RequestCancelledError,
    ResourceExhaustedError,
    UnavailableError,
    UnsupportedFeatureError,
)
from tests.engine.harness import (
    LAST,
    Client,
    ImagePrompts,
    Reference,
    request,
    running,
    text_prompt,
)

PROMPT = text_prompt(50)
SEEDED = SamplingParams(temperature=1.0, top_p=0.9, seed=11, max_tokens=24)


@pytest.fixture(scope="module")
def reference(tiny_llama: Path) -> Reference:
    return Reference(tiny_llama, vision=False)


@pytest.fixture(scope="module")
def image_prompts(tiny_qwen2vl: Path) -> ImagePrompts:
    return ImagePrompts(load_family(tiny_qwen2vl), build_vision_runner(tiny_qwen2vl))


def seeded(request_id: str, **changes: Any) -> EngineRequest:
    return request(request_id, PROMPT, sampling=dataclasses.replace(SEEDED, **changes))


def eventually(condition: Callable[[], bool], timeout_s: float = 10.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "did not happen in time"
        time.sleep(0.005)


def hand_over(client: Client, source: Engine, done: PrefillDone, token_count: int) -> list[int]:
    """Copies the KV of a prefilled request into blocks of another engine."""
    target = client.engine
    blocks = target.pool.allocate(-(-token_count // target.pool.block_size))
    assert blocks is not None
    target.kv_cache.tensor[:, blocks] = source.kv_cache.tensor[:, list(done.block_ids)]
    return blocks


# --- what is drawn ---


def test_seeded_draws_do_not_depend_on_the_batch_and_differ_by_seed(tiny_llama: Path) -> None:
    with running(tiny_llama) as client:
        (alone,) = client.run([seeded("alone")])
    with running(tiny_llama, token_budget=17) as client:
        others = [request(f"o{i}", text_prompt(20 + i, seed=i), 30) for i in range(6)]
        *_, again, other = client.run([*others, seeded("again"), seeded("other", seed=12)])
    assert again == alone
    assert other != alone


def test_prefill_here_and_decode_there_draw_the_same_tokens(tiny_llama: Path) -> None:
    with running(tiny_llama) as whole, running(tiny_llama) as first, running(tiny_llama) as second:
        (expected,) = whole.run([seeded("r")])
        first.engine.submit(dataclasses.replace(seeded("r"), mode=RequestMode.PREFILL_ONLY))
        done = first.wait("r", PrefillDone)
        blocks = hand_over(second, first.engine, done, len(PROMPT))
        first.engine.release("r")
        prefilled = dataclasses.replace(
            seeded("r"),
            mode=RequestMode.PREFILLED,
            block_ids=tuple(blocks),
            first_token=done.token_id,
        )
        (rest,) = second.run([prefilled])
        assert [done.token_id, *rest] == expected
        finished = second.wait("r", Finished)
        assert finished.completion_tokens == len(expected)
        second.assert_idle()
        eventually(lambda: first.engine.stats().held_requests == 0)
        first.assert_idle()


def test_log_probabilities_are_those_of_the_raw_distribution(
    tiny_llama: Path, reference: Reference
) -> None:
    with running(tiny_llama) as client:
        client.run([seeded("r")])
        events = [e for e in client.events["r"] if isinstance(e, NewTokens)]
    tokens = [t for e in events for t in e.token_ids]
    got = [p for e in events for p in e.logprobs]
    expected = reference.logprobs([*PROMPT, *tokens], len(tokens))
    assert got == pytest.approx(expected, abs=1e-3)


@pytest.mark.parametrize("replayed", [1, 7])
def test_a_replayed_request_goes_on_with_the_same_tokens(tiny_llama: Path, replayed: int) -> None:
    with running(tiny_llama) as client:
        (whole,) = client.run([seeded("r")])
        (rest,) = client.run(
            [
                dataclasses.replace(
                    seeded("again"),
                    token_ids=[*PROMPT, *whole[:replayed]],
                    emitted_count=replayed,
                )
            ]
        )
        assert whole[:replayed] + rest == whole
        assert client.wait("again", Finished).completion_tokens == len(whole)


def test_end_tokens_stop_tokens_and_limits(tiny_llama: Path) -> None:
    with running(tiny_llama) as client:
        base = SamplingParams(max_tokens=12, ignore_eos=True)
        (free,) = client.run([request("free", PROMPT, sampling=base)])
        stop = free[4]
        at = free.index(stop)
        stopping = dataclasses.replace(base, stop_token_ids=(stop,))
        late = dataclasses.replace(stopping, min_tokens=at + 2)
        one = dataclasses.replace(base, max_tokens=1)
        stopped, delayed, single = client.run(
            [
                request("stopped", PROMPT, sampling=stopping),
                request("delayed", PROMPT, sampling=late),
                request("single", PROMPT, sampling=one),
            ]
        )
        assert len(free) == 12
        assert client.wait("free", Finished).reason is FinishReason.LENGTH
        assert stopped == free[: at + 1]
        assert client.wait("stopped", Finished).reason is FinishReason.STOP
        assert stop not in delayed[: at + 2]
        assert len(delayed) >= at + 2
        assert single == free[:1]
        client.assert_idle()


# --- memory ---


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

        for index in range(4):
            submit(index)
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


# --- the layer hook ---


def test_the_layer_hook_sees_every_layer_once_per_chunk_with_final_kv(tiny_llama: Path) -> None:
    calls: list[tuple[int, int, int]] = []
    copies: dict[tuple[int, int], torch.Tensor] = {}
    engines: list[Engine] = []

    def hook(layer: int, progress: Any) -> None:
        (one,) = progress
        assert (one.request_id, one.prompt_len, one.cached_tokens) == ("r", 100, 0)
        calls.append((layer, one.computed_before, one.computed_after))
        for index in range(one.computed_before // 8, -(-one.computed_after // 8)):
            block = engines[0].kv_cache.layers[layer][one.block_ids[index]]
            copies[layer, index] = block.clone()

    with running(tiny_llama, hook) as client:
        engines.append(client.engine)
        client.engine.submit(request("full", text_prompt(70, seed=5), 30))
        client.engine.submit(request("r", text_prompt(100), mode=RequestMode.PREFILL_ONLY))
        done = client.wait("r", PrefillDone)
        final = client.engine.kv_cache.tensor[:, list(done.block_ids)]
        client.engine.release("r")
        client.wait("full", *LAST)
    chunks = list(dict.fromkeys(call[1:] for call in calls))
    assert calls == [(layer, *chunk) for chunk in chunks for layer in range(3)]
    assert [before for before, _ in chunks] == [0, *(after for _, after in chunks[:-1])]
    assert chunks[-1][1] == 100
    for (layer, index), copy in copies.items():
        slots = min(8, 100 - index * 8)
        assert torch.equal(copy[..., :slots, :], final[layer, index][..., :slots, :])


# --- the end of a request ---


def test_cancel_in_every_state_ends_the_request_and_leaks_nothing(tiny_llama: Path) -> None:
    gate, reached = threading.Event(), threading.Event()

    def hook(layer: int, progress: Any) -> None:
        reached.set()
        assert gate.wait(30)

    with running(tiny_llama, hook, max_running=2, prefix_cache=False) as client:
        engine = client.engine
        long = SamplingParams(max_tokens=2000, ignore_eos=True)

        def cancelled(name: str) -> bool:
            error = client.wait(name, Failed).error
            return isinstance(error, RequestCancelledError)

        engine.submit(request("decoding", PROMPT, sampling=long))
        client.wait("decoding", NewTokens)
        engine.submit(request("prefilling", text_prompt(200), mode=RequestMode.PREFILL_ONLY))
        assert reached.wait(30)
        blocks = engine.pool.allocate(7)
        assert blocks is not None
        engine.submit(
            request(
                "arrived",
                PROMPT,
                mode=RequestMode.PREFILLED,
                block_ids=tuple(blocks),
                first_token=1,
                sampling=long,
            )
        )
        engine.submit(request("waiting", PROMPT))
        engine.submit(request("waiting-prefill", PROMPT, mode=RequestMode.PREFILL_ONLY))
        for name in ("waiting", "waiting-prefill", "arrived", "prefilling", "unknown"):
            engine.cancel(name)
        gate.set()
        for name in ("waiting", "waiting-prefill", "arrived", "prefilling"):
            assert cancelled(name), name
        assert engine.stats().held_requests == 1, "only what a transfer may read is held"
        engine.release("prefilling")
        # A release before the end cancels too.
        engine.submit(request("released", text_prompt(300), mode=RequestMode.PREFILL_ONLY))
        engine.release("released")
        assert cancelled("released")
        engine.cancel("decoding")
        assert cancelled("decoding")
        eventually(lambda: engine.stats().held_requests == 0)
        client.assert_idle()


def test_cancel_takes_effect_within_one_step(tiny_llama: Path) -> None:
    with running(tiny_llama) as client:
        sampling = SamplingParams(max_tokens=3000, ignore_eos=True)
        client.engine.submit(request("r", PROMPT, sampling=sampling))
        client.wait("r", NewTokens)
        client.engine.cancel("r")
        steps = client.engine.stats().steps
        client.wait("r", Failed)
        assert client.engine.stats().steps <= steps + 2


def test_a_fatal_error_fails_everybody_and_refuses_the_next(
    tiny_llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[Exception] = []
    with running(
        tiny_llama, max_running=1, before_start=lambda e: e.on_fatal(told.append)
    ) as client:
        sampling = SamplingParams(max_tokens=3000, ignore_eos=True)
        client.engine.submit(request("running", PROMPT, sampling=sampling))
        client.wait("running", NewTokens)
        client.engine.submit(request("waiting", PROMPT))

        def broken(*_: Any) -> None:
            raise RuntimeError("device lost")

        monkeypatch.setattr(client.engine._core._runner, "run", broken)
        for name in ("running", "waiting"):
            assert isinstance(client.wait(name, Failed).error, InternalError)
        eventually(lambda: bool(told))
        assert told == [client.engine.fatal_error]
        assert "device lost" in str(told[0])
        with pytest.raises(UnavailableError, match="failed"):
            client.engine.submit(request("late", PROMPT))
        client.assert_idle()


def test_an_output_that_is_no_number_fails_only_its_own_request(
    tiny_llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with running(tiny_llama) as client:
        runner = client.engine._core._runner
        run = runner.run

        def poisoned(runs: Any, layer_written: Any) -> torch.Tensor:
            logits = run(runs, layer_written).clone()
            sampled = [r for r in runs if r.sample]
            for row, one in enumerate(sampled):
                if one.token_ids[0] == PROMPT[0]:
                    logits[row] = torch.nan
            return logits

        monkeypatch.setattr(runner, "run", poisoned)
        client.engine.submit(request("bad", PROMPT))
        client.run([request("good", [PROMPT[0] ^ 1, 5, 6], 5)])
        assert isinstance(client.wait("bad", Failed).error, InternalError)
        client.assert_idle()


def test_stop_fails_what_is_left(tiny_llama: Path) -> None:
    with running(tiny_llama) as client:
        sampling = SamplingParams(max_tokens=3000, ignore_eos=True)
        client.engine.submit(request("r", PROMPT, sampling=sampling))
        client.wait("r", Admitted)
        assert client.engine.stop()
        assert isinstance(client.wait("r", Failed).error, UnavailableError)
        with pytest.raises(UnavailableError, match="stopping"):
            client.engine.submit(request("late", PROMPT))
        client.assert_idle()


# --- refusals ---


def test_a_full_queue_refuses_and_a_live_id_is_not_taken_twice(tiny_llama: Path) -> None:
    with running(tiny_llama, max_running=1, max_waiting=2) as client:
        sampling = SamplingParams(max_tokens=3000, ignore_eos=True)
        client.engine.submit(request("r0", PROMPT, sampling=sampling))
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
        {"token_ids": made.token_ids[: second.offset + 1]},
    ]
    with running(tiny_qwen2vl) as client:
        for fields in wrong:
            with pytest.raises(InvalidRequestError):
                client.engine.submit(dataclasses.replace(made, **fields))
        client.run([made])
    with running(tiny_llama) as client, pytest.raises(UnsupportedFeatureError):
        client.engine.submit(made)
