"""encoder_cache: what the embedding cache is worth.

Two fleets with one model of random weights, one with the cache and one without, answer the same
requests of one image, of which four in five have been sent before. Prefix caches are off in both: a
repeated image would be found there too. Hit rates are of the real cache accounts over synthetic
sequences (see :mod:`bench.reuse_workloads`), which stand for no real traffic.
"""

import argparse
import itertools
import tempfile
from collections.abc import Callable
from pathlib import Path
from statistics import fmean, median

from rich.console import Console
from rich.table import Table

from bench.harness import Sample, interleave, ratio, typical
from bench.hit_cost import measure_hits
from bench.image_fleet import FirstToken, ImageFleet, image_fleet, noise_image
from bench.outcome import Outcome
from bench.reuse_workloads import WORKLOADS, account_bytes, hit_rate
from bench.vision_model import Tower, make_vision_model
from epd.encoding.eviction_policy import PolicyName

#: Of five requests one has a new image: 80 % reuse.
WARM = 4
POLICIES: tuple[PolicyName, ...] = ("s3fifo", "lru")


def configure(parser: argparse.ArgumentParser) -> None:
    """Adds this benchmark's options."""
    parser.add_argument("--rounds", type=int, default=6, help="rounds of A B B A")
    parser.add_argument("--calls", type=int, default=300, help="hits measured one by one")
    parser.add_argument("--requests", type=int, default=8000, help="images per hit rate")
    parser.add_argument("--capacity-mib", type=int, default=64, help="cache of the hit rates")
    parser.add_argument("--depth", type=int, default=Tower.depth, help="layers of the tower")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--quick", action="store_true", help="little of everything")


def run(options: argparse.Namespace) -> Outcome:
    """Measures requests, single hits and hit rates."""
    if options.quick:
        options.rounds, options.calls, options.requests = 1, 50, 1000
    tower = Tower(depth=options.depth)
    flags = {"prefill": ["--prefix-cache=false"], "decode": ["--prefix-cache=false"]}
    with tempfile.TemporaryDirectory(prefix="epd-bench-model-") as folder:
        model = make_vision_model(Path(folder), tower)
        off_flags = {**flags, "encoder": ["--embedding-cache-bytes", "0"]}
        with (
            image_fleet(model, flags=flags) as on,
            image_fleet(model, flags=off_flags) as off,
        ):
            answers: dict[str, list[FirstToken]] = {"hit": [], "miss": []}
            arms = {
                "on": _Reuse(on, tower.image_side, answers).measure,
                "off": _Reuse(off, tower.image_side, None).measure,
            }
            samples = interleave(arms, options.rounds, options.seed)
            image = noise_image(tower.image_side, 1 << 40)
            encoder = on.fleet.processes["encoder-0"].address
            single = measure_hits(encoder, image, options.calls)
            memory = _memory(on, off)
    rates = {
        name: {policy: _mean_hit_rate(policy, name, options) for policy in POLICIES}
        for name in WORKLOADS
    }
    found = ratio(samples, "on", "off")
    overhead = typical(single, "hit") - typical(single, "plain")
    ttft = {kind: round(median(a.ttft_ms for a in of_kind), 2) for kind, of_kind in answers.items()}
    _print(samples, single, ttft, rates, memory)
    result = {
        "ttft_80pct_reuse_over_off": round(found.value, 3),
        "interval": [round(found.low, 3), round(found.high, 3)],
        "ttft_ms": {arm: round(typical(samples, arm), 2) for arm in ("on", "off")} | ttft,
        "hit_overhead_ms_p50": round(overhead, 3),
        "plain_rpc_ms_p50": round(typical(single, "plain"), 3),
        "hit_rate": rates,
        "hit_rate_capacity_mib": options.capacity_mib,
        "workloads": "synthetic",
        "memory": memory,
    }
    return Outcome(result, samples + single)


class _Reuse:
    """One arm: requests of one image, WARM of WARM + 1 sent before. Every image is used once."""

    def __init__(
        self, fleet: ImageFleet, side: int, answers: dict[str, list[FirstToken]] | None
    ) -> None:
        self._fleet = fleet
        self._side = side
        self._answers = answers
        self._runs = itertools.count()

    def measure(self, seed: int) -> float:
        """Mean TTFT in milliseconds; the requests that bring the warm images are not counted."""
        # Equal seeds come twice per arm, and the second time nothing would be new.
        base = (seed * 1000 + next(self._runs)) * (WARM + 1)
        images = [noise_image(self._side, base + number) for number in range(WARM + 1)]
        for image in images[:WARM]:
            self._fleet.ask([image])
        asked = [self._fleet.ask([image]) for image in images]
        if self._answers is not None:
            self._answers["hit"] += asked[:WARM]
            self._answers["miss"] += asked[WARM:]
        return fmean(one.ttft_ms for one in asked)


def _memory(on: ImageFleet, off: ImageFleet) -> dict[str, float]:
    """What the cache takes: of the encoders' resident memory, and per embedding it has kept."""
    kept = on.metric("encoder-0", "epd_embedding_cache_memory_usage_bytes")
    images = on.metric("encoder-0", "epd_encoder_forward_total")
    accounts = {f"account_bytes_{policy}": account_bytes(policy) for policy in POLICIES}
    return {
        "encoder_mib_on": round(on.resident_mib("encoder-0"), 1),
        "encoder_mib_off": round(off.resident_mib("encoder-0"), 1),
        "kept_mib": round(kept / (1 << 20), 2),
        "bytes_per_image": round(kept / images),
        **{name: round(value) for name, value in accounts.items()},
    }


def _mean_hit_rate(policy: PolicyName, workload: str, options: argparse.Namespace) -> float:
    """Over two seeds."""
    images: Callable[[int, int], itertools.chain[int]] = WORKLOADS[workload]  # type: ignore[assignment]
    capacity = options.capacity_mib << 20
    return round(
        fmean(
            hit_rate(policy, images(options.requests, options.seed + number), capacity)
            for number in range(2)
        ),
        4,
    )


def _print(
    samples: list[Sample],
    single: list[Sample],
    ttft: dict[str, float],
    rates: dict[str, dict[PolicyName, float]],
    memory: dict[str, float],
) -> None:
    table = Table(title="Embedding cache (synthetic reuse)")
    table.add_column("what")
    table.add_column("value", justify="right")
    for arm in ("on", "off"):
        table.add_row(f"TTFT at 80 % reuse, cache {arm}", f"{typical(samples, arm):.1f} ms")
    for kind, value in ttft.items():
        table.add_row(f"TTFT of a {kind}", f"{value:.1f} ms")
    for arm in ("plain", "hit"):
        table.add_row(f"{arm} call", f"{typical(single, arm):.2f} ms")
    for workload, by_policy in rates.items():
        for policy, rate in by_policy.items():
            table.add_row(f"hit rate, {workload}, {policy}", f"{rate:.1%}")
    for name, amount in memory.items():
        table.add_row(name.replace("_", " "), f"{amount:g}")
    Console().print(table)
