"""The encoder benchmarks on a tower of one layer, and the sequences behind the hit rates."""

import json
import subprocess
import sys
from typing import Any

import pytest

from bench.reuse_workloads import SIZES, WORKLOADS, account_bytes, hit_rate
from epd.encoding.eviction_policy import PolicyName


def last_line(*arguments: str) -> dict[str, Any]:
    """The result of a run."""
    command = [sys.executable, "-m", "bench", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return result


@pytest.mark.full
def test_encoder_cache_tells_reuse_hits_and_rates() -> None:
    result = last_line(*("encoder_cache", "--rounds=1", "--calls=5", "--requests=500", "--depth=1"))
    assert 0 < result["ttft_80pct_reuse_over_off"] < 10
    assert result["hit_overhead_ms_p50"] > 0
    assert result["hit_rate"].keys() == {"zipf", "chat_window"}
    for rates in result["hit_rate"].values():
        assert rates.keys() == {"s3fifo", "lru"}
        assert all(0 < rate < 1 for rate in rates.values())
    assert result["memory"]["kept_mib"] > 0


@pytest.mark.full
def test_encoder_parallel_tells_the_ratio() -> None:
    result = last_line("encoder_parallel", "--rounds=1", "--images=2", "--depth=1")
    assert 0 < result["ttft_two_over_one"] < 10
    assert result["encode_share_of_ttft"].keys() == {"one", "two"}


@pytest.mark.full
def test_encode_overlap_tells_gain_and_cost_and_that_it_engages_when_idle_only() -> None:
    result = last_line("encode_overlap", "--rounds=1", "--images=2", "--words=200")
    assert result["ttft_on_over_off"].keys() == {"idle", "joined", "loaded"}
    assert all(0 < cost < 10 for cost in result["text_ttft_on_over_off"].values())
    assert result["engaged"]["idle"] > result["engaged"]["loaded"]


@pytest.mark.parametrize("policy", ["s3fifo", "lru"])
def test_the_accounts_of_an_embedding_take_little(policy: PolicyName) -> None:
    assert account_bytes(policy) < 4096


def test_more_memory_hits_more_and_one_hit_wonders_favour_s3fifo() -> None:
    rates = {
        (policy, megabytes): hit_rate(policy, WORKLOADS["zipf"](4000, 0), megabytes << 20)
        for policy in ("s3fifo", "lru")
        for megabytes in (16, 64)
    }
    for policy in ("s3fifo", "lru"):
        assert rates[policy, 16] < rates[policy, 64] < 0.5
    assert rates["s3fifo", 64] > rates["lru", 64]


@pytest.mark.parametrize("policy", ["s3fifo", "lru"])
def test_with_room_for_everything_only_first_times_miss(policy: PolicyName) -> None:
    images = list(WORKLOADS["chat_window"](1000, 0))
    room = len(images) * max(SIZES)
    found = hit_rate(policy, iter(images), room)
    assert found == pytest.approx(1 - len(set(images)) / len(images))
