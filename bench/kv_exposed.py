"""kv_exposed: how much of the KV push shows, layer by layer against all after the forward pass.

Two prefill workers of one model, one with ``--push layerwise`` and one with ``--push after``, hand
requests over to the same idle decode worker, one at a time. Prompts are whole chunks, so the last
chunk is the same whatever the length: what a layer-wise push leaves to do after the forward pass
does not grow, what the serialised one leaves does.
"""

import argparse
import asyncio
import random
import tempfile
from collections.abc import Sequence
from pathlib import Path
from statistics import median

from rich.console import Console
from rich.table import Table

from bench.hand_over import HandOver, PairClient
from bench.harness import Sample
from bench.outcome import Outcome
from epd.engine.families.registry import load_family
from epd.fleet.fleet import Fleet
from epd.fleet.plan import FleetPlan
from epd.model_fetch import fetch

ARMS = {"layerwise": "prefill-0", "after": "prefill-1"}
#: A round: a drift of the machine hits both arms alike.
ORDER = ("layerwise", "after", "after", "layerwise")
MEASURES = ("exposed", "second_gap", "later_gap", "push_exposed", "kv_exposed")


def configure(parser: argparse.ArgumentParser) -> None:
    """Adds this benchmark's options."""
    parser.add_argument("--model", type=Path, help="Llama folder; default SmolLM2, fetched once")
    parser.add_argument("--lengths", type=int, nargs="+", default=[256, 1024, 2048])
    parser.add_argument("--chunk", type=int, default=256, help="tokens of a prefill chunk")
    parser.add_argument("--new-tokens", type=int, default=12)
    parser.add_argument("--rounds", type=int, default=3, help="rounds of A B B A")
    parser.add_argument("--threads", type=int, default=1, help="of each worker")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--quick", action="store_true", help="one round, the ends of the range only"
    )


def run(options: argparse.Namespace) -> Outcome:
    """Measures every length with both arms."""
    if options.quick:
        options.lengths, options.rounds = [min(options.lengths), max(options.lengths)], 1
    folder = options.model or fetch("smollm2")
    with tempfile.TemporaryDirectory(prefix="epd-bench-") as logs:
        fleet = Fleet(_plan(folder, options), Path(logs))
        fleet.start()
        try:
            raw = asyncio.run(_measure(fleet, load_family(folder).vocab_size, options))
        finally:
            fleet.stop()
    Console().print(_table(raw, options.lengths))
    return Outcome(_result(raw, options.lengths), raw)


def _plan(folder: Path, options: argparse.Namespace) -> FleetPlan:
    blocks = 3 * -(-(max(options.lengths) + options.new_tokens) // 32)
    every = ("--prefix-cache=false", f"--kv-blocks={blocks}", f"--threads={options.threads}")
    return FleetPlan(
        folder,
        encoders=0,
        prefills=2,
        decodes=1,
        flags={"prefill": (*every, f"--token-budget={options.chunk}"), "decode": every},
        worker_flags={process: (f"--push={arm}",) for arm, process in ARMS.items()},
        environment={"OMP_NUM_THREADS": str(options.threads)},
    )


async def _measure(fleet: Fleet, vocab_size: int, options: argparse.Namespace) -> list[Sample]:
    decode = fleet.processes["decode-0"].address
    clients = {
        arm: PairClient(fleet.processes[process].address, decode) for arm, process in ARMS.items()
    }
    samples: list[Sample] = []

    async def one(arm: str, length: int, number: int) -> HandOver:
        seed = options.seed + number
        chance = random.Random(f"{seed} {length}")
        prompt = [chance.randrange(vocab_size) for _ in range(length)]
        return await clients[arm].run(prompt, options.new_tokens)

    try:
        for arm in ARMS:  # unmeasured
            await one(arm, min(options.lengths), 0)
        for number in range(options.rounds):
            for arm in ARMS if options.quick else ORDER:
                for length in options.lengths:
                    found = await one(arm, length, number)
                    samples += [
                        Sample(f"{arm}@{length} {name}", number, number, getattr(found, name))
                        for name in MEASURES
                    ]
    finally:
        for client in clients.values():
            await client.close()
    return samples


def p50(samples: Sequence[Sample], arm: str, length: int, measure: str) -> float:
    """Median of one measure of one arm at one length."""
    wanted = f"{arm}@{length} {measure}"
    return median(sample.value for sample in samples if sample.arm == wanted)


def _result(samples: Sequence[Sample], lengths: Sequence[int]) -> dict[str, object]:
    """The keys say 2048 and 256: the longest and the shortest length."""
    result: dict[str, object] = {"lengths": list(lengths)}
    low, high = min(lengths), max(lengths)
    for arm, suffix in (("layerwise", ""), ("after", "_serialised")):

        def typical(length: int, measure: str, arm: str = arm) -> float:
            return p50(samples, arm, length, measure)

        result |= {
            f"exposed_2048_over_256{suffix}": round(
                typical(high, "exposed") / typical(low, "exposed"), 3
            ),
            f"exposed_ms_p50{suffix}": round(typical(high, "exposed"), 2),
            f"second_gap_over_later{suffix}": round(
                typical(high, "second_gap") / typical(high, "later_gap"), 3
            ),
            f"step_ms_p50{suffix}": round(typical(high, "later_gap"), 2),
            f"kv_exposed_ms_p50{suffix}": round(typical(high, "kv_exposed"), 2),
        }
    return result


def _table(samples: Sequence[Sample], lengths: Sequence[int]) -> Table:
    table = Table(title="KV push, medians in ms")
    for column in ("push", "tokens", "exposed", "of it KV", "gap 1-2", "later gap", "ratio"):
        table.add_column(column, justify="right")
    for arm in ARMS:
        for length in lengths:
            second, later = (p50(samples, arm, length, m) for m in ("second_gap", "later_gap"))
            table.add_row(
                arm,
                str(length),
                f"{p50(samples, arm, length, 'exposed'):.2f}",
                f"{p50(samples, arm, length, 'kv_exposed'):.2f}",
                f"{second:.1f}",
                f"{later:.1f}",
                f"{second / later:.2f}",
            )
    return table
