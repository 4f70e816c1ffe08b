"""The native decoder computes what the transformers module does, in any grouping of tokens."""

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from epd.engine.families.base import ModelFamily
from epd.engine.families.registry import load_family
from epd.engine.kv_cache import KVCache
from epd.engine.kv_layout import KvLayout
from epd.engine.language_runner import LanguageRunner, TokenRun
from epd.engine.native.build import NativeBuildError
from epd.engine.native.decoder import NativeDecoder
from epd.engine.native.library import NativeLibrary
from epd.engine.native.select import choose_execution
from epd.engine.torch_attention import TorchAttention
from tests.support.tiny_model import make_tiny_llama, make_tiny_qwen2vl

CPU = torch.device("cpu")
PROMPTS = ([5, 80, 3, 41, 17] * 9, [9, 2, 77], list(range(60, 130)))


@pytest.fixture(scope="module", params=[make_tiny_llama, make_tiny_qwen2vl])
def family(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> ModelFamily:
    return load_family(request.param(tmp_path_factory.mktemp("model")))


def kv_cache(family: ModelFamily) -> KVCache:
    shape = family.attention_shape
    layout = KvLayout("", shape.layer_count, shape.kv_head_count, shape.head_dim, "float32", 16)
    return KVCache(layout, 32, CPU)


def torch_runner(family: ModelFamily) -> LanguageRunner:
    modules = family.load_language(torch.float32, CPU)
    return LanguageRunner(family, modules, kv_cache(family), TorchAttention)


def native_runner(family: ModelFamily) -> LanguageRunner:
    execution = choose_execution(family, family.load_language(torch.float32, CPU), threads=1)
    assert isinstance(execution.modules.body, NativeDecoder)
    return LanguageRunner(family, execution.modules, kv_cache(family), execution.attention)


def blocks(row: int) -> range:
    return range(row * 8, row * 8 + 8)


def prefill(runner: LanguageRunner, prompts: Sequence[Sequence[int]]) -> torch.Tensor:
    return runner.run(
        [TokenRun(ids, 0, len(ids), blocks(row), True) for row, ids in enumerate(prompts)]
    )


def greedy(runner: LanguageRunner, prompts: Sequence[Sequence[int]], count: int) -> list[list[int]]:
    sequences = [list(prompt) for prompt in prompts]
    logits = prefill(runner, sequences)
    for _ in range(count):
        for sequence, token in zip(sequences, logits.argmax(-1).tolist(), strict=True):
            sequence.append(token)
        logits = runner.run(
            [
                TokenRun(ids, len(ids) - 1, len(ids), blocks(row), True)
                for row, ids in enumerate(sequences)
            ]
        )
    return [ids[len(prompt) :] for ids, prompt in zip(sequences, prompts, strict=True)]


@pytest.mark.usefixtures("compiled")
def test_logits_and_kv_equal_those_of_the_transformers_module(family: ModelFamily) -> None:
    native, plain = native_runner(family), torch_runner(family)

    def assert_near(found: torch.Tensor, expected: torch.Tensor) -> None:
        # float32 sums in another order, values up to 10
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)

    assert_near(prefill(native, PROMPTS), prefill(plain, PROMPTS))
    assert_near(native.kv_cache.tensor, plain.kv_cache.tensor)


@pytest.mark.usefixtures("compiled")
def test_greedy_tokens_equal_those_of_the_transformers_module(family: ModelFamily) -> None:
    expected = greedy(torch_runner(family), PROMPTS, 24)
    assert greedy(native_runner(family), PROMPTS, 24) == expected


@pytest.mark.usefixtures("compiled")
def test_logits_are_bitwise_the_same_alone_batched_and_chunked(family: ModelFamily) -> None:
    runner = native_runner(family)
    together = prefill(runner, PROMPTS)
    for row, ids in enumerate(PROMPTS):
        assert torch.equal(prefill(runner, [ids])[0], together[row])
        for start, end in ((0, 1), (1, 2), (2, len(ids))):
            chunk = runner.run([TokenRun(ids, start, end, blocks(0), True)])
        assert torch.equal(chunk[0], together[row])


@pytest.mark.usefixtures("compiled")
def test_each_layer_is_reported_once_in_order_after_its_kv_is_final(family: ModelFamily) -> None:
    runner = native_runner(family)
    seen: list[tuple[int, torch.Tensor]] = []
    ids = PROMPTS[0]
    runner.run(
        [TokenRun(ids, 0, len(ids), blocks(0), True)],
        lambda layer: seen.append((layer, runner.kv_cache.layers[layer].clone())),
    )
    assert [layer for layer, _ in seen] == list(range(family.attention_shape.layer_count))
    for layer, kv in seen:
        assert torch.equal(kv, runner.kv_cache.layers[layer])


@pytest.mark.usefixtures("compiled")
def test_the_module_s_own_weights_are_views_of_the_fused_ones(family: ModelFamily) -> None:
    modules = family.load_language(torch.float32, CPU)
    choose_execution(family, modules, threads=1)
    attention: Any = modules.body.get_submodule("layers.0.self_attn")
    assert (
        attention.k_proj.weight.data_ptr()
        == attention.q_proj.weight.data_ptr() + attention.q_proj.weight.nbytes
    )


def test_without_a_compiler_the_torch_path_runs_and_one_line_says_why(
    family: ModelFamily,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    tmp_path: Path,
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr("epd.engine.native.build.default_cache_folder", lambda: tmp_path)
    modules = family.load_language(torch.float32, CPU)
    execution = choose_execution(family, modules)
    assert execution.modules is modules
    assert execution.attention is TorchAttention
    assert [record.message for record in caplog.records] == [
        "plain torch instead of native kernels: no C++ compiler (g++ or c++) on the path"
    ]


def test_other_weights_than_float32_stay_with_torch(family: ModelFamily) -> None:
    modules = family.load_language(torch.bfloat16, CPU)
    assert choose_execution(family, modules).modules is modules


def test_a_library_that_cannot_be_loaded_is_a_build_error(tmp_path: Path) -> None:
    broken = tmp_path / "kernels.so"
    broken.write_text("no library")
    with pytest.raises(NativeBuildError, match="cannot be loaded"):
        NativeLibrary(threads=1, path=broken)


@pytest.mark.usefixtures("compiled")
def test_layers_that_are_watched_one_by_one_give_the_same_bits(family: ModelFamily) -> None:
    """Watched, the layers are called one by one; unwatched, all in one native call."""
    watched, unwatched = native_runner(family), native_runner(family)
    calls: list[tuple[str, int]] = []
    run = TokenRun(PROMPTS[0], 0, len(PROMPTS[0]), blocks(0), True)
    found = watched.run(
        [run],
        layer_written=lambda layer: calls.append(("written", layer)),
        before_layer=lambda layer: calls.append(("before", layer)),
    )
    layers = range(family.attention_shape.layer_count)
    assert calls == [(name, layer) for layer in layers for name in ("before", "written")]
    assert torch.equal(found, unwatched.run([run]))
    assert torch.equal(watched.kv_cache.tensor, unwatched.kv_cache.tensor)


@pytest.mark.usefixtures("compiled")
@pytest.mark.parametrize("watched", [False, True])
def test_a_step_that_nobody_watches_is_one_native_call(family: ModelFamily, watched: bool) -> None:
    """Between calls the engine thread may wait for the interpreter, twice a layer."""
    execution = choose_execution(family, family.load_language(torch.float32, CPU), threads=1)
    decoder = execution.modules.body
    assert isinstance(decoder, NativeDecoder)
    calls: Counter[str] = Counter()
    decoder._library.functions = CountedCalls(decoder._library.functions, calls)  # type: ignore[assignment]
    runner = LanguageRunner(family, execution.modules, kv_cache(family), execution.attention)
    run = TokenRun(PROMPTS[1], 0, len(PROMPTS[1]), blocks(0), True)
    runner.run([run], layer_written=(lambda layer: None) if watched else None)
    layers = family.attention_shape.layer_count
    halves = calls["epd_attention_half"], calls["epd_mlp_half"]
    assert (*halves, calls["epd_layers"]) == ((layers, layers, 0) if watched else (0, 0, 1))


class CountedCalls:
    """The library's functions; each use of one is counted."""

    def __init__(self, functions: Any, counts: Counter[str]) -> None:
        self._functions = functions
        self._counts = counts

    def __getattr__(self, name: str) -> Any:
        self._counts[name] += 1
        return getattr(self._functions, name)
