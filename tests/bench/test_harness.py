"""Interleaving, ratios and records of the benchmarks."""

import json
from pathlib import Path

from bench.harness import Sample, interleave, ratio
from bench.record import provenance, save


def test_a_round_is_a_b_b_a_with_one_seed_after_a_warm_up_of_each() -> None:
    calls: list[tuple[str, int]] = []

    def arm(name: str) -> float:
        return float(len(calls))

    def first(seed: int) -> float:
        calls.append(("a", seed))
        return arm("a")

    def second(seed: int) -> float:
        calls.append(("b", seed))
        return arm("b")

    samples = interleave({"a": first, "b": second}, rounds=2, seed=7)
    measured = [("a", 7), ("b", 7), ("b", 7), ("a", 7), ("a", 8), ("b", 8), ("b", 8), ("a", 8)]
    assert calls == [("a", 7), ("b", 7), *measured]
    assert [(s.arm, s.seed) for s in samples] == measured


def test_a_linear_drift_of_the_machine_cancels() -> None:
    clock = iter(range(100, 1000))
    samples = interleave(
        {"a": lambda _: 2.0 * next(clock), "b": lambda _: float(next(clock))}, rounds=5, seed=0
    )
    assert abs(ratio(samples, "a", "b").value - 2.0) < 0.01


def test_the_interval_holds_the_ratio_and_narrows_to_it_without_noise() -> None:
    samples = [
        Sample(arm, number, number, value + noise)
        for number, noise in enumerate((0.0, 0.1, 0.2, 0.1, 0.0))
        for arm, value in (("a", 3.0), ("b", 1.0))
    ]
    noisy = ratio(samples, "a", "b")
    assert noisy.low < noisy.value < noisy.high
    exact = ratio([s for s in samples if s.round in (0, 4)], "a", "b")
    assert (exact.low, exact.value, exact.high) == (3.0, 3.0, 3.0)


def test_a_record_names_versions_and_cpu_but_no_folder(tmp_path: Path) -> None:
    origin = provenance(["decode_hf", "--out", str(tmp_path), "--model", "/home/someone/smollm2"])
    path = save(tmp_path, "decode_hf", origin, {"x": 1}, [])
    text = path.read_text()
    assert json.loads(text)["provenance"]["packages"]["torch"]
    assert "someone" not in text
    assert str(tmp_path.parent) not in text
