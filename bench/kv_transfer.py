"""kv_transfer: from post to the receiver's notice, our whole path against raw NIXL.

A sending and a receiving process on one machine hold synthetic pools with the geometry of
SmolLM2-135M. Both arms move the same shuffled blocks in every round: nothing can be coalesced.
The raw arm is one WRITE of all layers with one notice; ours is what a prefill worker does, a WRITE
and a notice per layer and the seal, up to the point where decode could start. Every side that
waits, in both arms, polls and then sleeps for the agent's poll time. Both processes read the
machine's one monotonic clock.
"""

import argparse
import os

from rich.console import Console
from rich.table import Table

from bench.harness import Sample, interleave, ratio, typical
from bench.line_process import LineProcess
from bench.outcome import Outcome
from bench.synthetic_kv import SHAPE, blocks_of

#: Transport to UCX_TLS. Shared memory needs TCP beside it to notice a dead peer.
TRANSPORTS = {"shm": "sm,tcp,self", "tcp": "tcp,self"}
MIB = 1 << 20
BLOCK_BYTES = SHAPE.block_bytes * SHAPE.layer_count


def configure(parser: argparse.ArgumentParser) -> None:
    """Adds this benchmark's options."""
    parser.add_argument("--sizes", type=int, nargs="+", default=[4, 16, 64, 256], metavar="MIB")
    parser.add_argument("--transports", nargs="+", choices=TRANSPORTS, default=list(TRANSPORTS))
    parser.add_argument("--rounds", type=int, default=12, help="rounds of A B B A")
    parser.add_argument("--seed", type=int, default=0)


def run(options: argparse.Namespace) -> Outcome:
    """Measures every size over every transport."""
    table = Table(title="KV push, two processes, shuffled blocks")
    for column in ("transport", "MiB", "raw ms", "epd ms", "raw/epd", "95 % interval", "GB/s"):
        table.add_column(column, justify="right")
    raw: list[Sample] = []
    ratios: dict[str, float] = {}
    for transport in options.transports:
        with _Pair(transport, max(options.sizes)) as pair:
            for size in options.sizes:
                samples = pair.measure(size, options.rounds, options.seed)
                raw += samples
                found = ratio(samples, "raw", "epd")
                table.add_row(
                    transport,
                    str(size),
                    f"{typical(samples, 'raw'):.2f}",
                    f"{typical(samples, 'epd'):.2f}",
                    f"{found.value:.2f}",
                    f"{found.low:.2f} to {found.high:.2f}",
                    f"{blocks_of(size * MIB) * BLOCK_BYTES / typical(samples, 'epd') / 1e6:.2f}",
                )
    Console().print(table)
    return Outcome({"ratio_vs_raw": ratios}, raw)


class _Pair:
    """Sending and receiving process over one transport."""

    def __init__(self, transport: str, largest: int) -> None:
        env = {**os.environ, "UCX_TLS": TRANSPORTS[transport]}
        num_blocks = blocks_of(largest * MIB) * 3 // 2
        self.decode = LineProcess("bench.kv_decode_process", num_blocks, env=env)
        self.prefill = LineProcess("bench.kv_prefill_process", num_blocks, env=env)
        theirs = self.decode.ask("hello")
        self.decode.ask("meet", **self.prefill.ask("meet", **theirs))
        self._count = 0

    def __enter__(self):
        return self

    def __exit__(self, *args):
        self.prefill.__exit__(*args)
        self.decode.__exit__(*args)

    def measure(self, size, rounds, seed):
        count = blocks_of(size * MIB)
        arms = {"raw": lambda s: self.raw(s, count), "epd": lambda s: self.epd(s, count)}
        return interleave(arms, rounds, seed)

    def raw(self, seed, count):
        local, remote = (
            self.prefill.ask("choose", seed=seed, count=count),
            self.decode.ask("choose", seed=seed, count=count),
        )
        self._count += 1
        notice = f"raw {self._count}"
        self.decode.tell("await_raw", notice=notice)
        started = self.prefill.ask("write_raw", local=local, remote=remote, notice=notice)
        return (self.decode.answer() - started) / 1e6

    def epd(self, seed, count):
        local, remote = (
            self.prefill.ask("choose", seed=seed, count=count),
            self.decode.ask("choose", seed=seed, count=count),
        )
        self._count += 1
        name = f"{self._count:032x}"
        self.decode.tell("await_sealed", transfer_id=name)
        started = self.prefill.ask("push", local=local, transfer_id=name)
        ms = (self.decode.answer() - started) / 1e6
        if self._count < 4:
            assert self.prefill.ask("checksum", blocks=local) == self.decode.ask(
                "checksum", blocks=remote
            )
        return ms
