"""pipelined_start: what it gains that decode begins while the last layers still arrive, and costs.

Two decode workers, one with ``--pipelined-start``, get requests from two prefill workers, one over
the wire as it is and one over a slow one: ``--faults rate=``, where WRITEs leave one after another
and each is delivered when a wire of so many bytes per second would have done it. First one request
at a time on an idle worker, then over the slow wire beside an answer that runs all the while.

*After seal* is the gap between tokens 1 and 2 less what prefill says about its push: from the end
of the forward pass to the end of the last WRITE. That part varies with the forward pass, which the
slow wire runs beside.
"""

import argparse
import asyncio
import random
import tempfile
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean, median, quantiles

from rich.console import Console
from rich.table import Table

from bench.hand_over import HandOver, PairClient
from bench.harness import Sample
from bench.outcome import Outcome
from epd.engine.families.registry import load_family
from epd.fleet.fleet import Fleet
from epd.fleet.plan import FleetPlan
from epd.model_fetch import fetch
from epd.telemetry.prometheus import scrape

DECODES = {"off": "decode-0", "on": "decode-1"}
PREFILLS = {"fast": "prefill-0", "slow": "prefill-1"}
#: A round: a drift of the machine hits both arms alike.
ORDER = ("off", "on", "on", "off")
MEASURES = ("exposed", "second_gap", "later_gap", "push_exposed", "kv_exposed")
#: Of the answer that runs beside hand-overs.
COMPANY_PROMPT, COMPANY_TOKENS = 64, 160


def configure(parser: argparse.ArgumentParser) -> None:
    """Adds this benchmark's options."""
    parser.add_argument("--model", type=Path, help="Llama folder; default SmolLM2, fetched once")
    parser.add_argument("--lengths", type=int, nargs="+", default=[256, 1024], help="fast wire")
    parser.add_argument("--slow-lengths", type=int, nargs="+", default=[256, 512])
    parser.add_argument("--rate", type=float, default=8e6, help="bytes/s of the slow wire")
    parser.add_argument("--chunk", type=int, default=256, help="tokens of a prefill chunk")
    parser.add_argument("--new-tokens", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=3, help="rounds of A B B A")
    parser.add_argument("--threads", type=int, default=1, help="of each worker")
    parser.add_argument("--seed", type=int, default=0)


def run(options: argparse.Namespace) -> Outcome:
    """Measures both arms over both wires, then both in company over the slow one."""
    folder = options.model or fetch("smollm2")
    with tempfile.TemporaryDirectory(prefix="epd-bench-") as logs:
        fleet = Fleet(_plan(folder, options), Path(logs))
        fleet.start()
        try:
            bench = _Bench(fleet, load_family(folder).vocab_size, options)
            raw = asyncio.run(bench.measure())
        finally:
            fleet.stop()
    cases = [
        *(("fast", length) for length in options.lengths),
        *(("slow", length) for length in options.slow_lengths),
        ("company", options.slow_lengths[0]),
    ]
    Console().print(_table(raw, cases))
    return Outcome(_result(raw, cases), raw)


def _plan(folder: Path, options: argparse.Namespace) -> FleetPlan:
    longest = max(*options.lengths, *options.slow_lengths, COMPANY_PROMPT + COMPANY_TOKENS)
    blocks = 4 * -(-(longest + options.new_tokens) // 32)
    every = ("--prefix-cache=false", f"--kv-blocks={blocks}", f"--threads={options.threads}")
    return FleetPlan(
        folder,
        encoders=0,
        prefills=2,
        decodes=2,
        flags={"prefill": (*every, f"--token-budget={options.chunk}"), "decode": every},
        worker_flags={
            DECODES["on"]: ("--pipelined-start=true",),
            DECODES["off"]: ("--pipelined-start=false",),
            PREFILLS["slow"]: (f"--faults=rate={options.rate}", "--allow-faults"),
        },
        environment={"OMP_NUM_THREADS": str(options.threads)},
    )


class _Bench:
    def __init__(self, fleet: Fleet, vocab_size: int, options: argparse.Namespace) -> None:
        self._fleet = fleet
        self._vocab_size = vocab_size
        self._options = options
        self._clients: dict[tuple[str, str], PairClient] = {}
        self._samples: list[Sample] = []

    async def measure(self) -> list[Sample]:
        options = self._options
        addresses = {name: process.address for name, process in self._fleet.processes.items()}
        self._clients = {
            (wire, arm): PairClient(addresses[prefill], addresses[decode])
            for wire, prefill in PREFILLS.items()
            for arm, decode in DECODES.items()
        }
        try:
            for client in self._clients.values():  # unmeasured
                await client.run(self._prompt(min(options.lengths), 0), options.new_tokens)
            for number in range(options.rounds):
                for arm in ORDER:
                    for wire, lengths in (
                        ("fast", options.lengths),
                        ("slow", options.slow_lengths),
                    ):
                        for length in lengths:
                            await self._alone(wire, arm, length, number)
                    await self._company(arm, options.slow_lengths[0], number)
        finally:
            for client in self._clients.values():
                await client.close()
        return self._samples

    async def _alone(self, wire: str, arm: str, length: int, number: int) -> None:
        await self._hand_over(wire, wire, arm, length, number)

    async def _company(self, arm: str, length: int, number: int) -> None:
        """Hand-overs over the slow wire until an answer on the same worker has ended."""
        prompt = self._prompt(COMPANY_PROMPT, number)
        admitted = asyncio.Event()  # its own hand-over is none of those that are counted
        client = self._clients["fast", arm]
        running = asyncio.create_task(client.run(prompt, COMPANY_TOKENS, admitted))
        await admitted.wait()
        while not running.done():
            await self._hand_over("company", "slow", arm, length, number)
        gaps = (await running).gaps[1:]
        for name, value in (
            ("others_mean", fmean(gaps)),
            ("others_p95", quantiles(gaps, n=20)[-1]),
            ("others_max", max(gaps)),
        ):
            self._note("company", arm, length, number, name, value)

    async def _hand_over(
        self, case: str, wire: str, arm: str, length: int, number: int
    ) -> HandOver:
        before = self._steps(arm)
        prompt = self._prompt(length, number)
        found = await self._clients[wire, arm].run(prompt, self._options.new_tokens)
        for name in MEASURES:
            self._note(case, arm, length, number, name, getattr(found, name))
        after_seal = found.second_gap - found.push_exposed
        self._note(case, arm, length, number, "after_seal", after_seal)
        for name, count, past in zip(("begun", "committed"), self._steps(arm), before, strict=True):
            self._note(case, arm, length, number, name, count - past)
        return found

    def _steps(self, arm: str) -> tuple[float, float]:
        told = scrape(self._fleet.processes[DECODES[arm]].metrics_address)
        return told.total("epd_early_step_total"), told.total("epd_early_step_committed_total")

    def _note(self, case: str, arm: str, length: int, number: int, name: str, value: float) -> None:
        seed = self._options.seed + number
        self._samples.append(Sample(f"{case}@{length} {arm} {name}", number, seed, value))

    def _prompt(self, length: int, number: int) -> list[int]:
        chance = random.Random(f"{self._options.seed + number} {length}")
        return [chance.randrange(self._vocab_size) for _ in range(length)]


def values(samples: Sequence[Sample], case: tuple[str, int], arm: str, name: str) -> list[float]:
    """All measurements of one quantity of one arm in one case."""
    wanted = f"{case[0]}@{case[1]} {arm} {name}"
    return [sample.value for sample in samples if sample.arm == wanted]


def _result(samples: Sequence[Sample], cases: Sequence[tuple[str, int]]) -> dict[str, object]:
    result: dict[str, object] = {}
    for case in cases:
        name = f"{case[0]}_{case[1]}"
        for arm in DECODES:
            for measure in ("second_gap", "after_seal"):
                typical = median(values(samples, case, arm, measure))
                result[f"{name}_{measure}_ms_{arm}"] = round(typical, 2)
        begun, committed = (fmean(values(samples, case, "on", m)) for m in ("begun", "committed"))
        result[f"{name}_begun"], result[f"{name}_committed"] = round(begun, 3), round(committed, 3)
        result[f"{name}_begun_off"] = sum(values(samples, case, "off", "begun"))
    for arm in DECODES:
        for name in ("others_mean", "others_p95", "others_max"):
            found = median(values(samples, cases[-1], arm, name))
            result[f"company_{name}_ms_{arm}"] = round(found, 2)
    return result


def _table(samples: Sequence[Sample], cases: Sequence[tuple[str, int]]) -> Table:
    table = Table(title="Pipelined start, medians in ms")
    measures = ("exposed", "second_gap", "after_seal", "later_gap")
    titles = ("exposed", "gap 1-2", "after seal", "later gap")
    for column in ("case", "tokens", "start", *titles, "begun", "kept"):
        table.add_column(column, justify="right")
    for case in cases:
        for arm in DECODES:
            cells = (f"{median(values(samples, case, arm, name)):.2f}" for name in measures)
            shares = (
                f"{fmean(values(samples, case, arm, name)):.2f}" for name in ("begun", "committed")
            )
            table.add_row(case[0], str(case[1]), arm, *cells, *shares)
    return table
