"""However a request ends, it is told so and leaves nothing behind."""

import threading
from pathlib import Path
from typing import Any

import pytest
import torch

from epd.engine.requests import (
    Admitted,
    Failed,
    NewTokens,
    RequestMode,
    SamplingParams,
)
from epd.errors import (
    InternalError,
    RequestCancelledError,
    UnavailableError,
)
from tests.engine.harness import (
    eventually,
    request,
    running,
    text_prompt,
)

PROMPT = text_prompt(50)
ENDLESS = SamplingParams(max_tokens=3000, ignore_eos=True)


def test_cancel_in_every_state_ends_the_request_and_leaks_nothing(tiny_llama: Path) -> None:
    gate, reached = threading.Event(), threading.Event()

    def hook(layer: int, progress: Any) -> None:
        reached.set()
        assert gate.wait(30)

    with running(tiny_llama, hook, max_running=2, prefix_cache=False) as client:
        engine = client.engine

        def cancelled(name: str) -> bool:
            error = client.wait(name, Failed).error
            return isinstance(error, RequestCancelledError)

        engine.submit(request("decoding", PROMPT, sampling=ENDLESS))
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
                sampling=ENDLESS,
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
        client.engine.submit(request("r", PROMPT, sampling=ENDLESS))
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
        client.engine.submit(request("running", PROMPT, sampling=ENDLESS))
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


def test_kv_behind_an_output_that_is_no_number_is_not_found_again(
    tiny_llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A fault that has passed must not fail every later request of the same beginning."""
    prompt = text_prompt(60)
    with running(tiny_llama) as client:
        (expected,) = client.run([request("before", prompt, 8)])
        runner = client.engine._core._runner
        run = runner.run

        def poisoned(runs: Any, layer_written: Any) -> torch.Tensor:
            runner.kv_cache.tensor.fill_(torch.nan)
            return run(runs, layer_written)

        monkeypatch.setattr(runner, "run", poisoned)
        client.engine.submit(request("bad", prompt, 8))
        assert isinstance(client.wait("bad", Failed).error, InternalError)
        monkeypatch.undo()
        assert client.run([request("after", prompt, 8)]) == [expected]
        client.assert_idle()


def test_stop_fails_what_is_left(tiny_llama: Path) -> None:
    with running(tiny_llama) as client:
        client.engine.submit(request("r", PROMPT, sampling=ENDLESS))
        client.wait("r", Admitted)
        assert client.engine.stop()
        assert isinstance(client.wait("r", Failed).error, UnavailableError)
        with pytest.raises(UnavailableError, match="stopping"):
            client.engine.submit(request("late", PROMPT))
        client.assert_idle()
