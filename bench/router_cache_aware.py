"""router_cache_aware: mean TTFT with random and with cache-aware routing, over the same workers.

A real fleet: two prefill workers, one decode worker, and two routers before them, one of which
sends prompts to prefill workers by chance. Each run has new prefixes, so no run finds what another
has left in the caches. The caches of both workers together hold all prefixes of a run, each alone
half of them and one more: that is where routing can help. The control has no prefix in common.

The arms take turns; requests are a closed loop of ``--concurrency`` clients in a random order.
"""

import argparse
import asyncio
import random
import tempfile
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean

import grpc
from rich.console import Console
from rich.table import Table

from bench.harness import Sample, interleave, ratio, typical
from bench.outcome import Outcome
from bench.streams import at_once, prompt_through_router
from epd.fleet.fleet import Fleet
from epd.fleet.plan import FleetPlan
from epd.v1.router_pb2_grpc import RouterServiceStub

BLOCK = 32
_LOW_ID, _HIGH_ID = 20, 250  # in the vocabulary of every model, byte-level ones too
ARMS = ("random", "predicted")


def configure(parser: argparse.ArgumentParser) -> None:
    """Adds this benchmark's options."""
    parser.add_argument("--model", type=Path, default=Path("models/shapes-vl"))
    parser.add_argument("--quick", action="store_true", help="a fraction of the work")
    parser.add_argument("--rounds", type=int, help="rounds of A B B A; default 3, quick 1")
    parser.add_argument("--prefixes", type=int, help="shared prefixes; default 8, quick 4")
    parser.add_argument("--requests", type=int, help="per prefix; default 12, quick 6")
    parser.add_argument("--prefix-blocks", type=int, default=48, help="blocks of 32 tokens")
    parser.add_argument("--concurrency", type=int, default=4)
    parser.add_argument("--seed", type=int, default=0)


def run(options: argparse.Namespace) -> Outcome:
    """Measures both workloads."""
    bench = _Bench(options)
    # Half of the prefixes and one more: what runs takes its own blocks out of the same pool.
    blocks = (bench.prefixes // 2 + 1) * (options.prefix_blocks + 2)
    prefill = (f"--kv-blocks={blocks}", "--max-running=2")
    threads = {"OMP_NUM_THREADS": "1", "EPD_THREADS": "1"}
    plan = FleetPlan(
        options.model, encoders=0, prefills=2, flags={"prefill": prefill}, environment=threads
    )
    with tempfile.TemporaryDirectory(prefix="epd-bench-") as folder:
        fleet = Fleet(plan, Path(folder))
        try:
            fleet.start()
            routers = {
                policy: fleet.add_router(policy, f"--prefill-policy={policy}").address
                for policy in ARMS
            }
            return bench.run(routers)
        finally:
            fleet.stop()


class _Bench:
    """Workloads and their measurement."""

    def __init__(self, options: argparse.Namespace) -> None:
        quick = options.quick
        self.prefixes = options.prefixes or (4 if quick else 8)
        self._requests = options.requests or (6 if quick else 12)
        self._rounds = options.rounds or (1 if quick else 3)
        self._prefix_tokens = options.prefix_blocks * BLOCK
        self._concurrency = options.concurrency
        self._seed = options.seed
        #: Every run has prompts of its own, also when two arms share a seed.
        self._runs = 0

    def run(self, routers: dict[str, str]) -> Outcome:
        """A B B A per round, with and without sharing."""
        raw: list[Sample] = []
        found = {}
        table = Table(title="Mean TTFT of two prefill workers")
        for column in ("workload", "random ms", "cache-aware ms", "ratio", "95 % interval"):
            table.add_column(column, justify="right")
        for name, shared in (("sharing", True), ("no sharing", False)):

            def measure(policy: str, seed: int, shared: bool = shared) -> float:
                return asyncio.run(self._mean_ttft_ms(routers[policy], seed, shared))

            arms = {policy: (lambda seed, policy=policy: measure(policy, seed)) for policy in ARMS}
            samples = interleave(arms, self._rounds, self._seed)
            raw += [Sample(f"{s.arm}:{name}", s.round, s.seed, s.value) for s in samples]
            found[name] = ratio(samples, *ARMS)
            table.add_row(
                name,
                *(f"{typical(samples, policy):.0f}" for policy in ARMS),
                f"{found[name].value:.2f}",
                f"{found[name].low:.2f} to {found[name].high:.2f}",
            )
        Console().print(table)
        return Outcome(
            {
                "ttft_random_over_cache_aware": round(found["sharing"].value, 3),
                "ttft_no_sharing_ratio": round(found["no sharing"].value, 3),
                "interval": {n: [round(r.low, 3), round(r.high, 3)] for n, r in found.items()},
            },
            raw,
        )

    async def _mean_ttft_ms(self, router: str, seed: int, shared: bool) -> float:
        self._runs += 1
        prompts = self._prompts(random.Random(f"{seed} {self._runs}"), shared)
        async with grpc.aio.insecure_channel(router) as channel:
            stub = RouterServiceStub(channel)
            queue = iter(prompts)

            async def ask(tokens: int) -> float:
                return (await prompt_through_router(stub, next(queue), tokens)).ttft_s

            timings = await at_once(ask, len(prompts), self._concurrency, 1)
        return fmean(timings) * 1e3

    def _prompts(self, generator: random.Random, shared: bool) -> list[Sequence[int]]:
        """Prefixes times requests in a random order; the control is cut to as many new tokens."""

        def tokens(count: int) -> list[int]:
            return [generator.randrange(_LOW_ID, _HIGH_ID) for _ in range(count)]

        prefixes = [tokens(self._prefix_tokens) for _ in range(self.prefixes)]
        prompts: list[Sequence[int]] = []
        for prefix in prefixes:
            for _ in range(self._requests):
                start = prefix if shared else tokens(self._prefix_tokens // 4)
                prompts.append([*start, *tokens(BLOCK)])
        generator.shuffle(prompts)
        return prompts
