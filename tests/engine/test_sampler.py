"""Draws follow the distribution and depend on nothing but request and position."""

import numpy as np
import pytest
import torch

from epd.engine.sampler import Draw, sample, uniform
from epd.sampling import SamplingParams

VOCAB = 50
LOGITS = torch.randn(8, VOCAB, generator=torch.Generator().manual_seed(1)) * 3


def test_uniform_is_a_pure_function_with_even_spread() -> None:
    values = np.array([uniform(seed, 0, p) for seed in range(20) for p in range(200)])
    assert uniform(3, 1, 7) == uniform(3, 1, 7)
    assert len({uniform(3, 1, 7), uniform(4, 1, 7), uniform(3, 2, 7), uniform(3, 1, 8)}) == 4
    assert values.min() >= 0
    assert values.max() < 1
    counts, _ = np.histogram(values, 10, (0, 1))
    assert abs(counts - 400).max() < 100


def test_greedy_takes_the_likeliest_and_reports_its_raw_log_probability() -> None:
    drawn = sample(LOGITS, [Draw(SamplingParams(), 5)] * 8)
    best = LOGITS.log_softmax(-1).max(-1)
    assert [d.token_id for d in drawn] == best.indices.tolist()
    assert [d.logprob for d in drawn] == pytest.approx(best.values.tolist(), abs=1e-5)


def test_a_draw_does_not_depend_on_its_company() -> None:
    draws = [
        Draw(SamplingParams(temperature=0.2 + i / 4, top_k=i, top_p=1 - i / 20, seed=i), 9 * i)
        for i in range(8)
    ]
    together = sample(LOGITS, draws)
    alone = [sample(LOGITS[i : i + 1], [draws[i]])[0] for i in range(8)]
    assert together == alone


@pytest.mark.parametrize(
    ("filters", "kept"),
    [
        ({"top_k": 2}, {0, 1}),
        ({"top_p": 0.5}, {0}),
        ({"top_p": 0.51}, {0, 1}),
        ({"min_p": 0.4}, {0, 1}),
        ({"top_k": 3, "top_p": 0.83}, {0, 1}),
        ({}, {0, 1, 2, 3}),
    ],
)
def test_filters_keep_exactly_the_named_tokens(filters: dict[str, float], kept: set[int]) -> None:
    logits = torch.tensor([[0.5, 0.25, 0.15, 0.1]]).log()
    draws = [
        Draw(SamplingParams(temperature=1.0, seed=s, **filters), 1)  # type: ignore[arg-type]
        for s in range(200)
    ]
    drawn = sample(logits.expand(200, -1), draws)
    assert {d.token_id for d in drawn} == kept
    raw = {d.token_id: d.logprob for d in drawn}
    assert raw == pytest.approx({t: logits[0, t].item() for t in kept}, abs=1e-5)


def test_frequencies_follow_temperature() -> None:
    logits = torch.tensor([[0.6, 0.3, 0.1]]).log()
    draws = [Draw(SamplingParams(temperature=0.5, seed=7), p) for p in range(4000)]
    drawn = sample(logits.expand(4000, -1), draws)
    counts = np.bincount([d.token_id for d in drawn], minlength=3) / 4000
    expected = np.array([0.36, 0.09, 0.01]) / 0.46
    assert abs(counts - expected).max() < 0.03


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_suppressed_tokens_are_never_drawn(temperature: float) -> None:
    likely = LOGITS.topk(3).indices
    draws = [
        Draw(SamplingParams(temperature=temperature, seed=i), 3, frozenset(likely[i].tolist()))
        for i in range(8)
    ]
    for row, drawn in enumerate(sample(LOGITS, draws)):
        assert drawn.token_id not in likely[row]


def test_ties_at_a_filters_edge_are_all_kept() -> None:
    logits = torch.zeros(1, 4)
    draws = [Draw(SamplingParams(temperature=1.0, top_k=2, seed=s), 1) for s in range(100)]
    assert {d.token_id for d in sample(logits.expand(100, -1), draws)} == {0, 1, 2, 3}


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize(
    "filters", [{}, {"temperature": 1.0, "top_p": 0.5}, {"temperature": 1.0, "min_p": 0.5}]
)
def test_logits_that_are_no_numbers_spoil_their_own_row_only(
    bad: float, filters: dict[str, float]
) -> None:
    logits = LOGITS[:2].clone()
    logits[0, 3] = bad
    spoilt, sound = sample(logits, [Draw(SamplingParams(**filters), 1)] * 2)  # type: ignore[arg-type]
    assert np.isnan(spoilt.logprob)
    assert not np.isnan(sound.logprob)
