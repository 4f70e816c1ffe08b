"""The hook that pushes KV sees each layer when it is final."""

from pathlib import Path
from typing import Any

import torch

from epd.engine.engine import Engine
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
