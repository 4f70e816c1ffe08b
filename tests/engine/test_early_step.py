"""A first step that begins before all of its KV is there: never wrong, never in anybody's way."""

import dataclasses
import itertools
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from epd.engine.engine import Engine
from epd.engine.kv_arrival import KvArrival
from epd.engine.requests import (
    Admitted,
    Failed,
    Finished,
    NewTokens,
    PrefillDone,
    RequestMode,
    SamplingParams,
)
from epd.errors import NotFoundError, RequestCancelledError
from tests.engine.harness import Client, eventually, request, running, text_prompt

LAYERS = 3
OTHER = SamplingParams(max_tokens=1500, ignore_eos=True)
SAMPLINGS = {
    "greedy": SamplingParams(max_tokens=24, ignore_eos=True),
    "seeded": SamplingParams(max_tokens=24, temperature=1.0, seed=7, ignore_eos=True),
    "penalised": SamplingParams(
        max_tokens=24, temperature=0.7, seed=3, frequency_penalty=1.5, ignore_eos=True
    ),
    "two": SamplingParams(max_tokens=2, ignore_eos=True),
}
#: So long that a test which waits for it has failed.
PATIENCE_S = 300.0


class Arrival(KvArrival):
    """Predicts that whatever is missing is about to come; tells which layer is waited for."""

    def __init__(self) -> None:
        super().__init__(LAYERS, itertools.count(1).__next__)
        self._pace_ns = 1.0
        self.asked = threading.Event()

    def wait(self, layer: int, timeout_s: float) -> bool:
        self.asked.set()
        return super().wait(layer, timeout_s)


class Wire:
    """The KV of one prompt, computed by an engine and carried to other blocks layer by layer."""

    def __init__(self, client: Client, name: str, prompt: list[int], **fields: Any) -> None:
        self.engine = client.engine
        self.name, self._source = name, f"{name}-source"
        whole = request(self._source, prompt, mode=RequestMode.PREFILL_ONLY, **fields)
        self.engine.submit(whole)
        self._done = client.wait(self._source, PrefillDone)
        blocks = self.engine.pool.allocate(len(self._done.block_ids))
        assert blocks is not None
        self.blocks = blocks
        for layer in range(LAYERS):  # what lay there before
            self.engine.kv_cache.layers[layer][self.blocks] = float("nan")
        self.arrival = Arrival()
        self.request = dataclasses.replace(
            whole,
            request_id=name,
            mode=RequestMode.PREFILLED,
            block_ids=tuple(self.blocks),
            first_token=self._done.token_id,
            arrival=self.arrival,
        )

    @property
    def first_token(self) -> int:
        return self._done.token_id

    def carry(self, *layers: int) -> None:
        for layer in layers:
            kv = self.engine.kv_cache.layers[layer]
            kv[self.blocks] = kv[list(self._done.block_ids)]
            self.arrival.note(range(layer, layer + 1))

    def close(self) -> None:
        self.engine.release(self._source)


def patient(engine: Engine) -> None:
    """Lets an early step that is alone wait for long."""
    for _ in range(2):
        engine._core._scheduler.chunk_limit.observe(1, 0, PATIENCE_S)


@contextmanager
def decoding(folder: Path, **changes: Any) -> Iterator[Client]:
    with running(folder, before_start=patient, prefix_cache=False, **changes) as client:
        yield client
        eventually(lambda: client.engine.stats().held_requests == 0)
        client.assert_idle()


def expected(client: Client, prompt: list[int], sampling: SamplingParams) -> list[int]:
    (tokens,) = client.run([request(f"alone-{sampling}", prompt, sampling=sampling)])
    return tokens


def early_steps(engine: Engine) -> tuple[int, int, int]:
    stats = engine.stats()
    return stats.early_steps, stats.early_committed, stats.early_late


@pytest.mark.parametrize("native", [False, True])
@pytest.mark.parametrize("kind", SAMPLINGS)
@pytest.mark.parametrize("length", [40, 43])  # whole blocks, and a last block that is shared
def test_a_step_that_waits_for_its_layers_draws_the_same_tokens(
    tiny_llama: Path, native: bool, kind: str, length: int
) -> None:
    prompt, sampling = text_prompt(length), SAMPLINGS[kind]
    with decoding(tiny_llama, native=native) as client:
        wanted = expected(client, prompt, sampling)
        wire = Wire(client, "r", prompt, sampling=sampling)
        wire.carry(0)
        wire.arrival.expect(1)
        client.engine.submit(wire.request)
        assert wire.arrival.asked.wait(30)
        wire.carry(1, 2)
        eventually(lambda: early_steps(client.engine)[0] == 1)
        assert "r" not in client.events, "nothing leaves before the seal"
        client.engine.sealed("r")
        client.wait("r", Finished)
        assert [wire.first_token, *client.tokens("r")] == wanted
        assert client.wait("r", Admitted).early is True
        assert early_steps(client.engine) == (1, 1, 0)
        wire.close()


@pytest.mark.parametrize("native", [False, True])
def test_in_company_a_late_layer_stalls_nobody_and_spoils_no_token(
    tiny_llama: Path, native: bool
) -> None:
    prompt = text_prompt(43)
    with decoding(tiny_llama, native=native) as client:
        wanted = expected(client, prompt, SAMPLINGS["seeded"])
        wire = Wire(client, "r", prompt, sampling=SAMPLINGS["seeded"])
        wire.carry(0)
        wire.arrival.expect(1)
        client.engine.submit(request("other", text_prompt(30, seed=1), sampling=OTHER))
        client.wait("other", NewTokens)
        client.engine.submit(wire.request)
        while early_steps(client.engine)[0] == 0:
            client.pump()
        seen = len(client.tokens("other"))
        while len(client.tokens("other")) < seen + 20:  # the wire is held all the while
            client.pump()
        assert early_steps(client.engine) == (1, 0, 1)
        assert not wire.arrival.asked.is_set(), "in company nobody waits"
        wire.carry(1, 2)
        client.engine.sealed("r")
        client.wait("r", Finished)
        assert client.wait("r", Admitted).early is False
        assert [wire.first_token, *client.tokens("r")] == wanted
        client.engine.cancel("other")
        client.wait("other", Failed)
        other = client.tokens("other")
        sampling = dataclasses.replace(OTHER, max_tokens=len(other))
        assert other == expected(client, text_prompt(30, seed=1), sampling)
        wire.close()


def test_in_company_a_step_in_time_gives_its_token(tiny_llama: Path) -> None:
    prompt = text_prompt(43)
    with decoding(tiny_llama) as client:
        wanted = expected(client, prompt, SAMPLINGS["greedy"])
        wire = Wire(client, "r", prompt, sampling=SAMPLINGS["greedy"])
        client.engine.submit(request("other", text_prompt(30, seed=1), sampling=OTHER))
        client.wait("other", NewTokens)
        wire.carry(0, 1, 2)
        wire.arrival.expect(1)
        client.engine.submit(wire.request)
        while early_steps(client.engine)[0] == 0:
            client.pump()
        assert "r" not in client.events
        client.engine.sealed("r")
        client.wait("r", Finished)
        assert [wire.first_token, *client.tokens("r")] == wanted
        assert early_steps(client.engine) == (1, 1, 0)
        client.engine.cancel("other")
        client.wait("other", Failed)
        wire.close()


def test_whoever_comes_while_a_lone_step_waits_is_served_at_once(tiny_llama: Path) -> None:
    with decoding(tiny_llama) as client:
        wire = Wire(client, "r", text_prompt(43), sampling=SAMPLINGS["greedy"])
        wire.carry(0)
        wire.arrival.expect(1)
        client.engine.submit(wire.request)
        assert wire.arrival.asked.wait(30)
        client.run([request("other", text_prompt(30, seed=1), 5)])  # the wire is held
        assert early_steps(client.engine) == (1, 0, 1)
        wire.carry(1, 2)
        client.engine.sealed("r")
        client.wait("r", Finished)
        wire.close()


@pytest.mark.parametrize("drawn", [False, True])
def test_a_cancel_before_the_seal_gives_no_token_and_leaves_the_blocks_to_their_owner(
    tiny_llama: Path, drawn: bool
) -> None:
    with decoding(tiny_llama) as client:
        engine = client.engine
        wire = Wire(client, "r", text_prompt(40), sampling=SAMPLINGS["greedy"])
        wire.carry(*range(LAYERS if drawn else 1))
        wire.arrival.expect(1)
        engine.submit(wire.request)
        if drawn:
            eventually(lambda: early_steps(engine)[0] == 1)
        else:
            assert wire.arrival.asked.wait(30)
        engine.cancel("r")
        assert isinstance(client.wait("r", Failed).error, RequestCancelledError)
        assert not client.tokens("r")
        with pytest.raises(NotFoundError):
            engine.sealed("r")
        wire.close()
        eventually(lambda: engine.stats().held_requests == 0)
        assert engine.pool.num_used == len(wire.blocks), "what the step took besides is free"
        engine.pool.free(wire.blocks)


def test_a_transfer_that_ends_ends_the_wait_for_it(tiny_llama: Path) -> None:
    with decoding(tiny_llama) as client:
        wire = Wire(client, "r", text_prompt(40), sampling=SAMPLINGS["greedy"])
        wire.carry(0)
        wire.arrival.expect(1)
        client.engine.submit(wire.request)
        assert wire.arrival.asked.wait(30)
        wire.arrival.end()
        eventually(lambda: early_steps(client.engine) == (1, 0, 1))
        client.engine.cancel("r")
        client.wait("r", Failed)
        client.engine.pool.free(wire.blocks)
        wire.close()


def test_no_step_is_begun_where_its_token_would_take_a_block_from_the_others(
    tiny_llama: Path,
) -> None:
    with decoding(tiny_llama, num_blocks=16) as client:
        wire = Wire(client, "r", text_prompt(40), sampling=SAMPLINGS["two"])
        taken = client.engine.pool.allocate(client.engine.pool.num_free)
        assert taken is not None
        wire.carry(*range(LAYERS))
        wire.arrival.expect(1)
        client.engine.submit(wire.request)
        client.engine.sealed("r")
        eventually(lambda: client.engine.stats().running_requests == 1)
        assert early_steps(client.engine) == (0, 0, 0)
        client.engine.pool.free(taken)
        client.wait("r", Finished)
        wire.close()


def test_the_engines_end_frees_what_was_sealed_and_leaves_the_rest(tiny_llama: Path) -> None:
    with running(tiny_llama, before_start=patient, prefix_cache=False) as client:
        engine = client.engine
        wires = [Wire(client, name, text_prompt(43, seed=1)) for name in ("sealed", "arriving")]
        for wire in wires:
            wire.carry(0)
            wire.arrival.expect(1)
        engine.submit(wires[0].request)
        assert wires[0].arrival.asked.wait(30)
        engine.submit(wires[1].request)
        engine.sealed("sealed")
        assert engine.stop()
        for wire in wires:
            assert not client.tokens(wire.name)
            client.wait(wire.name, Failed)
        engine.pool.free(wires[1].blocks)


def test_predictions_follow_the_pace_of_the_wire() -> None:
    clock = [0]
    arrival = KvArrival(4, lambda: clock[0])
    for layer in range(4):
        clock[0] += 1_000_000
        arrival.note(range(layer, layer + 1))
    assert arrival.remaining_s() is None, "prefill is not through"
    arrival.expect(2)
    assert arrival.remaining_s() == pytest.approx(0.004)
    assert not arrival.in_time(0.001)
    # Layer 0 is needed at once and comes in a millisecond.
    assert not arrival.in_time(1.0)
    clock[0] += 1_000_000
    arrival.note(range(1))
    assert arrival.remaining_s() == pytest.approx(0.003)
    assert arrival.in_time(0.004)
    assert not arrival.in_time(0.0038)
    clock[0] += 500_000
    assert arrival.remaining_s() == pytest.approx(0.0025)
    arrival.end()
    assert arrival.remaining_s() is None
