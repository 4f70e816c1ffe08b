"""decode_hf: decode steps of this engine against transformers ``generate``, same everything.

Both run greedily in float32 on the same threads from the same prompts of one length, so neither
pads. What is timed is the mean step between the first and the last token: prefill is not in it.
"""

import argparse
import random
from pathlib import Path

from rich.console import Console
from rich.table import Table

from bench.engine_arm import EngineArm
from bench.harness import Sample, interleave, ratio, typical
from bench.hf_arm import HfArm
from bench.outcome import Outcome
from epd.model_fetch import fetch


def configure(parser: argparse.ArgumentParser) -> None:
    """Adds this benchmark's options."""
    parser.add_argument("--model", type=Path, help="Llama folder; default SmolLM2, fetched once")
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 8], help="sequences at once")
    parser.add_argument("--prompt-tokens", type=int, default=64)
    parser.add_argument("--new-tokens", type=int, default=48)
    parser.add_argument("--rounds", type=int, default=5, help="rounds of A B B A")
    # One: with more, a single other process on the machine stalls every barrier of both arms.
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--seed", type=int, default=0)


def run(options: argparse.Namespace) -> Outcome:
    """Measures every batch size."""
    folder = options.model or fetch("smollm2")
    hf = HfArm(folder, options.threads)
    longest = options.prompt_tokens + options.new_tokens
    engine = EngineArm(folder, options.threads, max(options.batch), longest)
    raw: list[Sample] = []
    ratios, steps, equal_tokens = {}, {}, {}
    table = Table(title=f"Decode step, float32, {options.threads} threads")
    for column in ("batch", "transformers ms", "epd ms", "ratio", "95 % interval", "equal tokens"):
        table.add_column(column, justify="right")
    try:
        for batch in options.batch:
            outputs: dict[tuple[str, int], list[list[int]]] = {}

            def measure(arm: HfArm | EngineArm, seed: int, batch: int = batch) -> float:
                prompts = _prompts(seed, batch, options.prompt_tokens, arm.vocab_size)
                generated = arm.generate(prompts, options.new_tokens)
                outputs[arm.name, seed] = generated.token_ids  # noqa: B023
                return generated.step_s * 1e3

            arms = {"hf": lambda seed: measure(hf, seed), "epd": lambda seed: measure(engine, seed)}
            samples = interleave(arms, options.rounds, options.seed)
            found = ratio(samples, "hf", "epd")
            share = _equal_share(outputs)
            ratios[str(batch)], equal_tokens[str(batch)] = found, share
            steps[str(batch)] = {arm: round(typical(samples, arm), 2) for arm in arms}
            raw += [Sample(f"{s.arm}@{batch}", s.round, s.seed, s.value) for s in samples]
            table.add_row(
                str(batch),
                *(f"{steps[str(batch)][arm]:.1f}" for arm in arms),
                f"{found.value:.2f}",
                f"{found.low:.2f} to {found.high:.2f}",
                f"{share:.1%}",
            )
    finally:
        engine.close()
    Console().print(table)
    result = {
        "ratio_vs_hf": {b: round(r.value, 3) for b, r in ratios.items()},
        "interval": {b: [round(r.low, 3), round(r.high, 3)] for b, r in ratios.items()},
        "step_ms": steps,
        "equal_tokens": equal_tokens,
        "threads": options.threads,
    }
    return Outcome(result, raw)


def _prompts(seed: int, batch: int, length: int, vocab_size: int) -> list[list[int]]:
    generator = random.Random(seed)
    return [[generator.randrange(vocab_size) for _ in range(length)] for _ in range(batch)]


def _equal_share(outputs: dict[tuple[str, int], list[list[int]]]) -> float:
    """Share of sequences that both arms continued with the same tokens."""
    pairs = [
        (ours, theirs)
        for (arm, seed), sequences in outputs.items()
        if arm == "epd"
        for ours, theirs in zip(sequences, outputs["hf", seed], strict=True)
    ]
    return sum(ours == theirs for ours, theirs in pairs) / len(pairs)
