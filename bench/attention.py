"""attention: native paged attention against the torch path (gather, then SDPA), one layer."""

import argparse
import time
from functools import partial
from itertools import accumulate

import numpy as np
import torch
from rich.console import Console
from rich.table import Table

from bench.harness import Sample, interleave, ratio, typical
from bench.outcome import Outcome
from epd.engine.attention import AttentionFactory, AttentionMetadata
from epd.engine.native.attention import NativeAttention
from epd.engine.native.library import NativeLibrary
from epd.engine.torch_attention import TorchAttention

#: Name to (sequences, tokens with KV before the step, tokens in the step).
CASES = {
    "decode, 1 x 1024": (1, 1023, 1),
    "decode, 8 x 1024": (8, 1023, 1),
    "decode, 32 x 256": (32, 255, 1),
    "chunk of 128 at 0": (1, 0, 128),
    "chunk of 512 at 0": (1, 0, 512),
    "chunk of 512 at 3584": (1, 3584, 512),
    "chunk of 2048 at 0": (1, 0, 2048),
}
BLOCK_SIZE = 32


def configure(parser: argparse.ArgumentParser) -> None:
    """Adds this benchmark's options."""
    parser.add_argument("--heads", type=int, default=9)
    parser.add_argument("--kv-heads", type=int, default=3)
    parser.add_argument("--head-dim", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=7, help="rounds of A B B A")
    parser.add_argument("--threads", type=int, default=1)


def run(options: argparse.Namespace) -> Outcome:
    """Measures every case."""
    torch.set_num_threads(options.threads)
    library = NativeLibrary(options.threads)
    table = Table(title=f"Attention of one layer, float32, {options.threads} threads")
    for column in ("case", "torch ms", "native ms", "ratio", "95 % interval"):
        table.add_column(column, justify="right")
    raw: list[Sample] = []
    ratios = {}
    native = partial(NativeAttention, library)
    for name, (count, before, new) in CASES.items():
        step = _Step(count, before, new, options)
        arms = {"torch": partial(step.measure, TorchAttention)}
        arms["native"] = partial(step.measure, native)
        samples = interleave(arms, options.rounds, seed=0)
        found = ratio(samples, "torch", "native")
        ratios[name] = round(found.value, 3)
        raw += [Sample(f"{s.arm}: {name}", s.round, s.seed, s.value) for s in samples]
        table.add_row(
            name,
            *(f"{typical(samples, arm):.2f}" for arm in ("torch", "native")),
            f"{found.value:.2f}",
            f"{found.low:.2f} to {found.high:.2f}",
        )
    Console().print(table)
    return Outcome({"ratio_vs_torch": ratios, "threads": options.threads}, raw)


class _Step:
    """Random queries and KV of one step, blocks in random order."""

    def __init__(self, count: int, before: int, new: int, options: argparse.Namespace) -> None:
        context = before + new
        blocks = -(-context // BLOCK_SIZE)
        tables = torch.randperm(count * blocks, dtype=torch.int32).view(count, blocks)
        sequence = np.repeat(np.arange(count), new)
        index = np.tile(np.arange(before, context), count)
        starts = [0, *accumulate([new] * count)]
        self._metadata = AttentionMetadata(
            block_size=BLOCK_SIZE,
            slot_blocks=tables[sequence, index // BLOCK_SIZE].long(),
            slot_offsets=torch.from_numpy(index % BLOCK_SIZE),
            block_tables=tables,
            context_lens=torch.full((count,), context, dtype=torch.int32),
            query_starts=torch.tensor(starts, dtype=torch.int32),
            context_lens_list=[context] * count,
            query_starts_list=starts,
            single_count=count if new == 1 else 0,
        )
        kv_shape = (count * blocks, 2, options.kv_heads, BLOCK_SIZE, options.head_dim)
        self._layer_kv = torch.randn(kv_shape)
        self._query = torch.randn(count * new, options.heads, options.head_dim)
        self._repeats = max(1, 2048 * 64 // (count * new * context))

    @torch.inference_mode()
    def measure(self, factory: AttentionFactory, _seed: int) -> float:
        """Milliseconds of one layer; the once-per-step preparation is not counted."""
        attention = factory(self._metadata)
        scale = self._query.shape[-1] ** -0.5
        start = time.perf_counter_ns()
        for _ in range(self._repeats):
            attention.attend(self._query, self._layer_kv, scale)
        return (time.perf_counter_ns() - start) / 1e6 / self._repeats
