"""Two arms measured in turns, and what their ratio is worth."""

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, median

#: Takes a seed and returns what was measured; equal seeds give both arms equal work.
Measure = Callable[[int], float]


@dataclass(frozen=True)
class Sample:
    """One measurement. ``unit`` of ``value`` is the benchmark's."""

    arm: str
    round: int
    seed: int
    value: float


@dataclass(frozen=True)
class Ratio:
    """A ratio with the interval that holds it in 95 of 100 resamplings."""

    value: float
    low: float
    high: float


def interleave(arms: Mapping[str, Measure], rounds: int, seed: int) -> list[Sample]:
    """Runs two arms A and B as A B B A in every round, after one unmeasured run of each.

    A drift of the machine (heat, another process) that is linear over a round hits both alike.
    Every round has its own seed, the same for all four runs.
    """
    (first, run_first), (second, run_second) = arms.items()
    run_first(seed)
    run_second(seed)
    order = ((first, run_first), (second, run_second), (second, run_second), (first, run_first))
    return [
        Sample(name, number, seed + number, run(seed + number))
        for number in range(rounds)
        for name, run in order
    ]


def ratio(
    samples: Sequence[Sample], numerator: str, denominator: str, resamples: int = 2000
) -> Ratio:
    """Median over rounds of numerator / denominator, with a bootstrap interval over rounds."""
    rounds = sorted({sample.round for sample in samples})

    def mean(arm: str, number: int) -> float:
        return fmean(s.value for s in samples if (s.arm, s.round) == (arm, number))

    ratios = [mean(numerator, number) / mean(denominator, number) for number in rounds]
    generator = random.Random(0)
    medians = sorted(median(generator.choices(ratios, k=len(ratios))) for _ in range(resamples))
    low, high = medians[int(0.025 * resamples)], medians[int(0.975 * resamples)]
    return Ratio(median(ratios), low, high)


def typical(samples: Sequence[Sample], arm: str) -> float:
    """Median of an arm's measurements."""
    return median(sample.value for sample in samples if sample.arm == arm)
