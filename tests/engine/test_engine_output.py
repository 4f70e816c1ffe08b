"""What the engine draws depends on the request alone."""

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from epd.engine.engine import Engine
from epd.engine.requests import (
    EngineRequest,
    Finished,
    FinishReason,
    NewTokens,
    PrefillDone,
    RequestMode,
    SamplingParams,
)
from tests.engine.harness import (
    Client,
    Reference,
    eventually,
    request,
    running,
    text_prompt,
)

PROMPT = text_prompt(50)
SEEDED = SamplingParams(temperature=1.0, top_p=0.9, seed=11, max_tokens=24)


@pytest.fixture(scope="module")
def reference(tiny_llama: Path) -> Reference:
    return Reference(tiny_llama, vision=False)


def seeded(request_id: str, **changes: Any) -> EngineRequest:
    return request(request_id, PROMPT, sampling=dataclasses.replace(SEEDED, **changes))


def hand_over(client: Client, source: Engine, done: PrefillDone, token_count: int) -> list[int]:
    """Copies the KV of a prefilled request into blocks of another engine."""
    target = client.engine
    blocks = target.pool.allocate(-(-token_count // target.pool.block_size))
    assert blocks is not None
    target.kv_cache.tensor[:, blocks] = source.kv_cache.tensor[:, list(done.block_ids)]
    return blocks


def test_seeded_draws_do_not_depend_on_the_batch_and_differ_by_seed(tiny_llama: Path) -> None:
    with running(tiny_llama) as client:
        (alone,) = client.run([seeded("alone")])
    with running(tiny_llama, token_budget=17) as client:
        others = [request(f"o{i}", text_prompt(20 + i, seed=i), 30) for i in range(6)]
        *_, again, other = client.run([*others, seeded("again"), seeded("other", seed=12)])
    assert again == alone
    assert other != alone


@pytest.mark.parametrize("native", [False, True])
def test_numbers_that_overflowed_in_somebodys_blocks_spoil_nobody_who_gets_them(
    tiny_llama: Path, native: bool, reference: Reference
) -> None:
    """Where one request has left NaN behind, others compute side by side, alone and in chunks."""
    prompts = [text_prompt(length, seed=length) for length in (3, 8, 17, 60)]

    def spoil(engine: Engine) -> None:
        engine.kv_cache.tensor.fill_(float("nan"))

    with running(tiny_llama, before_start=spoil, native=native) as client:
        found = client.run([request(f"r{n}", one, 30) for n, one in enumerate(prompts)])
        alone = client.run([request("alone", text_prompt(21), 12)])
    assert found == [reference.generate_text(one, 30) for one in prompts]
    assert alone == [reference.generate_text(text_prompt(21), 12)]


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
