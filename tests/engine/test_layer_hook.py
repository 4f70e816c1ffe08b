"""The hook that pushes KV sees each layer when it is final."""

import queue
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

from epd.engine.engine import Engine
from epd.engine.layer_events import LayerEvents, record_on_stream
from epd.engine.requests import (
    PrefillDone,
    RequestMode,
)
from tests.engine.harness import (
    LAST,
    eventually,
    request,
    running,
    text_prompt,
)


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


def test_the_hook_starts_after_a_cached_prefix(tiny_llama: Path) -> None:
    seen: list[tuple[str, int, int, int]] = []

    def hook(layer: int, progress: Any) -> None:
        if layer == 0:
            seen.extend(
                (p.request_id, p.computed_before, p.computed_after, p.cached_tokens)
                for p in progress
            )

    with running(tiny_llama, hook) as client:
        blocks = []
        for name in ("first", "second"):
            client.engine.submit(request(name, text_prompt(40), mode=RequestMode.PREFILL_ONLY))
            blocks.append(client.wait(name, PrefillDone).block_ids)
        assert seen == [("first", 0, 40, 0), ("second", 32, 40, 32)]
        assert client.wait("second", PrefillDone).cached_tokens == 32
        assert blocks[0][:4] == blocks[1][:4], "the cached blocks are shared"
        for name in ("first", "second"):
            client.engine.release(name)
        eventually(lambda: client.engine.stats().held_requests == 0)
        client.assert_idle()


def test_on_a_device_behind_its_host_no_layer_is_told_before_it_is_there(tiny_llama: Path) -> None:
    """F04, with a device of three layers that comes to each when the test says so."""
    told: queue.Queue[int] = queue.Queue()
    reached = [threading.Event() for _ in range(3)]
    recorded: queue.Queue[int] = queue.Queue()

    def record() -> Any:
        layer = recorded.qsize()
        recorded.put(layer)
        return lambda: reached[layer].wait(60)

    with running(tiny_llama, lambda layer, progress: told.put(layer)) as client:
        runner: Any = client.engine._core._runner
        runner._layer_events = LayerEvents(record)
        client.engine.submit(request("r", text_prompt(24), mode=RequestMode.PREFILL_ONLY))
        eventually(lambda: recorded.qsize() == 3)  # the host waits for no layer
        for layer in range(3):
            assert told.empty()
            assert client.engine.stats().output_tokens == 0
            reached[layer].set()
            assert told.get(timeout=60) == layer
        client.wait("r", PrefillDone)
        client.engine.release("r")
        eventually(lambda: client.engine.stats().held_requests == 0)
        client.assert_idle()


def test_a_layer_call_that_fails_ends_the_step_and_no_further_layer_is_told() -> None:
    told: list[int] = []

    def hook(layer: int) -> None:
        told.append(layer)
        if layer == 1:
            raise RuntimeError("boom")

    events = LayerEvents(lambda: lambda: None)
    step = events.follow(hook)
    for layer in range(4):
        step(layer)
    with pytest.raises(RuntimeError, match="boom"):
        events.finish()
    assert told == [0, 1]
    events.follow(hook)(0)
    events.finish()
    assert told == [0, 1, 0]


def test_an_event_is_on_the_stream_of_the_engines_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not of the thread's current device: nothing of the KV is computed there."""
    recorded: list[Any] = []

    class Event:
        def __init__(self, blocking: bool) -> None:
            assert blocking

        def record(self, stream: Any = "of the current device") -> None:
            recorded.append(stream)

        def synchronize(self) -> None:
            recorded.append("waited")

    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: f"of {device}")
    wait = record_on_stream(torch.device("cuda:1"))
    assert recorded == ["of cuda:1"]
    wait()
    assert recorded[1:] == ["waited"]
