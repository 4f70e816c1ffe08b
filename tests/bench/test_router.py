"""The router's benchmarks end with one JSON line that has the promised keys."""

import json
import subprocess
import sys
from typing import Any

import pytest

from tests.support.tiny_model import make_tiny_llama


def _last_line(*arguments: str) -> dict[str, Any]:
    command = [sys.executable, "-m", "bench", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    found = json.loads(done.stdout.splitlines()[-1])
    assert isinstance(found, dict)
    return found


@pytest.mark.timeout(600)
def test_router_measures_everything_it_promises() -> None:
    result = _last_line("router", "--quick", "--streams", "20", "--concurrency", "2")
    assert result["streams_finished"] == 20
    assert result["message_rate_over_bare_proxy"] > 0
    assert result["tokens_per_s"] > 0
    assert 0 < result["rss_mb"] < 1000
    assert {"ttft_overhead_ms_p50", "per_token_overhead_ms_p50"} <= result.keys()


@pytest.mark.timeout(600)
def test_router_cache_aware_measures_both_workloads(tmp_path: Any) -> None:
    model = str(make_tiny_llama(tmp_path / "model"))
    options = ["--prefixes", "2", "--requests", "1", "--prefix-blocks", "2", "--concurrency", "1"]
    result = _last_line("router_cache_aware", "--quick", "--model", model, *options)
    assert result["ttft_random_over_cache_aware"] > 0
    assert result["ttft_no_sharing_ratio"] > 0
