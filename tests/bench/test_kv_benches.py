"""The KV benchmarks' command lines, at sizes that say nothing."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.support.tiny_model import make_tiny_llama


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_llama(tmp_path_factory.mktemp("model"))


def bench(out: Path, *arguments: object) -> tuple[dict[str, Any], dict[str, Any]]:
    """Last line and record of a benchmark."""
    command = [sys.executable, "-m", "bench", *map(str, arguments), "--out", str(out)]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    record = json.loads((out / f"{arguments[0]}.json").read_text())
    return json.loads(done.stdout.splitlines()[-1]), record


def test_kv_transfer_tells_ratio_added_time_and_reserve(tmp_path: Path, model: Path) -> None:
    result, record = bench(
        tmp_path,
        *("kv_transfer", "--sizes", 4, "--rounds", 1, "--model", model),
        *("--reserves", 3, "--streams", 2, "--idle-s", 1.0),
    )
    assert result["ratio_vs_raw"].keys() == {"shm", "tcp"}
    assert result["reserve_ms_p50"] > 0
    assert "added_ms_4mb" in result
    assert result["idle_thread_percent"] > 0
    arms = [sample["arm"] for sample in record["raw"]]
    assert arms[:4] == ["shm@4 raw", "shm@4 epd", "shm@4 epd", "shm@4 raw"]
    assert arms.count("reserve") == 3


def test_kv_exposed_tells_both_arms(tmp_path: Path, model: Path) -> None:
    result, record = bench(
        tmp_path,
        *("kv_exposed", "--model", model, "--lengths", 64, 192, "--chunk", 64),
        *("--new-tokens", 60, "--rounds", 1),
    )
    for suffix in ("", "_serialised"):
        for name in ("exposed_2048_over_256", "exposed_ms_p50", "second_gap_over_later"):
            # Two streams of two services: at this size their order is a matter of chance.
            assert isinstance(result[name + suffix], float), name
    # What was pushed after the forward pass cannot have ended before it.
    assert result["kv_exposed_ms_p50_serialised"] > 0
    counts = {sample["arm"].partition(" ")[0] for sample in record["raw"]}
    assert counts == {"layerwise@64", "layerwise@192", "after@64", "after@192"}


def test_pipelined_start_tells_both_arms_over_both_wires(tmp_path: Path, model: Path) -> None:
    result, record = bench(
        tmp_path,
        *("pipelined_start", "--model", model, "--lengths", 64, "--slow-lengths", 64),
        *("--chunk", 64, "--rounds", 1, "--rate", 2e6),
    )
    for case in ("fast_64", "slow_64", "company_64"):
        assert result[f"{case}_begun_off"] == 0
        assert 0 <= result[f"{case}_committed"] <= result[f"{case}_begun"] <= 1
        for arm in ("off", "on"):
            # Over two streams of two services, as above.
            assert isinstance(result[f"{case}_second_gap_ms_{arm}"], float)
    assert result["company_others_p95_ms_on"] > 0
    assert {sample["arm"].partition("@")[0] for sample in record["raw"]} == {
        *("fast", "slow", "company")
    }
