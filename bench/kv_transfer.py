"""kv_transfer: from post to the receiver's notice, our whole path against raw NIXL.

A sending and a receiving process on one machine hold synthetic pools with the geometry of
SmolLM2-135M. Both arms move the same shuffled blocks in every round: nothing can be coalesced.
The raw arm is one WRITE of all layers with one notice; ours is what a prefill worker does from the
layer hook to the seal, up to the point where decode could start. All layers come at once, as if
computed in no time, the worst case. Every side that waits, in both arms, polls by the same rule.
Both processes read the machine's one monotonic clock. Rounds are shared out over several pairs of
processes: a TCP connection, raw or ours, is a third slower than another for as long as it lasts.

Then the processor time of the receiving transfer thread while nothing is announced, and Reserve:
round trip and first WRITE on a decode worker that is busy decoding.
"""

import argparse
from collections.abc import Sequence
from pathlib import Path
from statistics import median

from rich.console import Console
from rich.table import Table

from bench.harness import Sample, ratio, typical
from bench.kv_pair import BLOCK_BYTES, MIB, TRANSPORTS, KvPair
from bench.outcome import Outcome
from bench.reserve import measure_reserve
from bench.synthetic_kv import blocks_of
from epd.model_fetch import fetch

#: From this size on the ratio counts; below it the added time does.
LARGE_MIB = 16
SMALL_MIB = 4


def configure(parser: argparse.ArgumentParser) -> None:
    """Adds this benchmark's options."""
    parser.add_argument("--sizes", type=int, nargs="+", default=[4, 16, 64, 256], metavar="MIB")
    parser.add_argument("--transports", nargs="+", choices=TRANSPORTS, default=list(TRANSPORTS))
    parser.add_argument("--rounds", type=int, default=20, help="rounds of A B B A")
    parser.add_argument("--pairs", type=int, default=4, help="of processes, one after the other")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--model", type=Path, help="for Reserve; default SmolLM2, fetched once")
    parser.add_argument("--reserves", type=int, default=100, help="reservations to time")
    parser.add_argument("--streams", type=int, default=4, help="requests decoded meanwhile")
    parser.add_argument("--threads", type=int, default=1, help="of the decode worker")
    parser.add_argument("--idle-s", type=float, default=5.0, help="to watch an idle thread for")
    parser.add_argument("--quick", action="store_true", help="5 rounds, 30 reservations")


def run(options: argparse.Namespace) -> Outcome:
    """Measures every size over every transport, then Reserve."""
    if options.quick:
        options.rounds, options.pairs, options.reserves, options.idle_s = 5, 2, 30, 1.0
    options.pairs = min(options.pairs, options.rounds)
    raw: list[Sample] = []
    for transport in options.transports:
        for number in range(options.pairs):
            raw += _measure_pair(transport, number, options)
    folder = options.model or fetch("smollm2")
    reserves = measure_reserve(folder, options.reserves, options.streams, options.threads)
    raw += [Sample("reserve", 0, options.seed, value) for value in reserves]
    Console().print(_table(raw, options))
    return Outcome(_result(raw, options), raw)


def _measure_pair(transport: str, number: int, options: argparse.Namespace) -> list[Sample]:
    """This pair's share of the rounds, which are numbered through, and an idle thread's time."""
    first, last = (options.rounds * n // options.pairs for n in (number, number + 1))
    raw: list[Sample] = []
    with KvPair(transport, max(options.sizes)) as pair:
        for size in options.sizes:
            samples = pair.measure(size, last - first, options.seed + first)
            prefix = f"{transport}@{size}"
            raw += [Sample(f"{prefix} {s.arm}", first + s.round, s.seed, s.value) for s in samples]
        if not number:
            percent = pair.idle_percent(options.idle_s)
            raw.append(Sample(f"{transport} idle", 0, options.seed, percent))
    return raw


def _result(raw: Sequence[Sample], options: argparse.Namespace) -> dict[str, object]:
    """``ratio_vs_raw``: raw time / ours, the worst large size; ``added_ms_4mb``: ours - raw."""
    large = [size for size in options.sizes if size >= LARGE_MIB] or [max(options.sizes)]
    small = min(options.sizes, key=lambda size: abs(size - SMALL_MIB))
    added = {
        transport: round(
            typical(raw, f"{transport}@{small} epd") - typical(raw, f"{transport}@{small} raw"), 2
        )
        for transport in options.transports
    }
    by_size = {
        transport: {str(size): round(_ratio(raw, transport, size), 3) for size in options.sizes}
        for transport in options.transports
    }
    return {
        "ratio_vs_raw": {
            transport: min(ratios[str(size)] for size in large)
            for transport, ratios in by_size.items()
        },
        "added_ms_4mb": max(added.values()),
        "reserve_ms_p50": round(median(s.value for s in raw if s.arm == "reserve"), 2),
        "idle_thread_percent": max(round(s.value, 2) for s in raw if s.arm.endswith(" idle")),
        "ratio_by_size": by_size,
        "added_ms_4mb_by_transport": added,
    }


def _ratio(raw: Sequence[Sample], transport: str, size: int) -> float:
    return ratio(raw_of(raw, transport, size), "raw", "epd").value


def raw_of(raw: Sequence[Sample], transport: str, size: int) -> list[Sample]:
    """The samples of one transport and size, their arm's name alone."""
    prefix = f"{transport}@{size} "
    return [
        Sample(s.arm.removeprefix(prefix), s.round, s.seed, s.value)
        for s in raw
        if s.arm.startswith(prefix)
    ]


def _table(raw: Sequence[Sample], options: argparse.Namespace) -> Table:
    table = Table(title="KV push between two processes, shuffled blocks")
    for column in ("transport", "MiB", "raw ms", "epd ms", "raw / epd", "95 % interval", "GB/s"):
        table.add_column(column, justify="right")
    for transport in options.transports:
        for size in options.sizes:
            samples = raw_of(raw, transport, size)
            found = ratio(samples, "raw", "epd")
            ours = typical(samples, "epd")
            table.add_row(
                transport,
                str(size),
                f"{typical(samples, 'raw'):.2f}",
                f"{ours:.2f}",
                f"{found.value:.2f}",
                f"{found.low:.2f} to {found.high:.2f}",
                f"{blocks_of(size * MIB) * BLOCK_BYTES / ours / 1e6:.2f}",
            )
    return table
