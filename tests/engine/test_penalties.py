"""Penalties, bias and top log probabilities equal transformers', wherever a request runs."""

from collections import Counter
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, LogitsProcessor, LogitsProcessorList
from transformers.generation.logits_process import (
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
)

from epd.engine.requests import NewTokens, PrefillDone, RequestMode, SamplingParams
from epd.errors import InvalidRequestError
from tests.engine.harness import Reference, request, running, text_prompt

TOKENS = 24
#: Strong, so that each of them changes the greedy tokens.
CASES: dict[str, dict[str, Any]] = {
    "repetition": {"repetition_penalty": 1.8},
    "repetition below one": {"repetition_penalty": 0.6},
    "frequency": {"frequency_penalty": 1.5},
    "negative frequency": {"frequency_penalty": -1.5},
    "presence": {"presence_penalty": 2.0},
    "bias": {"logit_bias": ((65, 4.0), (66, -100.0), (67, 2.5))},
    "all": {
        "repetition_penalty": 1.3,
        "frequency_penalty": 0.7,
        "presence_penalty": 0.4,
        "logit_bias": ((70, 3.0), (71, 3.0)),
    },
}


class OutputPenalties(LogitsProcessor):
    """Frequency and presence penalties as OpenAI's reference defines them, over the output only."""

    def __init__(self, prompt_len, frequency, presence):
        self._prompt_len = prompt_len
        self._frequency = frequency
        self._presence = presence

    def __call__(self, input_ids, scores):
        scores = scores.clone()
        for row, ids in enumerate(input_ids.tolist()):
            for token, count in Counter(ids[self._prompt_len :]).items():
                scores[row, token] -= count * self._frequency + self._presence
        return scores


@pytest.fixture(scope="module")
def folder(tiny_llama):
    return tiny_llama


@pytest.fixture(scope="module")
def model(folder):
    return AutoModelForCausalLM.from_pretrained(folder).eval()


def expected(model, prompt, params):
    """Greedy tokens of generate with transformers' own processors."""
    processors = LogitsProcessorList()
    if params.logit_bias:
        bias: list[list[list[int] | float]] = [
            [[token], value] for token, value in params.logit_bias
        ]
        processors.append(SequenceBiasLogitsProcessor(bias))
    if params.repetition_penalty != 1.0:
        processors.append(RepetitionPenaltyLogitsProcessor(params.repetition_penalty))
    processors.append(
        OutputPenalties(len(prompt), params.frequency_penalty, params.presence_penalty)
    )
    ids = torch.tensor([prompt])
    with torch.inference_mode():
        output = model.generate(
            input_ids=ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=TOKENS,
            do_sample=False,
            eos_token_id=None,
            logits_processor=processors,
        )
    return output[0, len(prompt) :].tolist()


def sampling(case, **more):
    return SamplingParams(max_tokens=TOKENS, ignore_eos=True, **CASES[case], **more)


def test_penalised_greedy_tokens_equal_transformers_in_one_batch(folder, model):
    prompt = text_prompt(37)
    with running(folder) as client:
        answers = client.run(request(case, prompt, sampling=sampling(case)) for case in CASES)
        client.assert_idle()
    plain = expected(model, prompt, SamplingParams())
    for case, answer in zip(CASES, answers, strict=True):
        assert answer == expected(model, prompt, sampling(case)), case
        assert answer != plain, f"{case} changes nothing, so nothing is shown"


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_replay_from_any_token_goes_on_as_if_nothing_had_happened(folder, temperature):
    prompt = text_prompt(21, seed=3)
    params = sampling("all", temperature=temperature, seed=11)
    with running(folder) as client:
        (whole,) = client.run([request("whole", prompt, sampling=params)])
        cuts = range(1, TOKENS)
        rests = client.run(
            request(f"from {cut}", prompt + whole[:cut], sampling=params, emitted_count=cut)
            for cut in cuts
        )
    assert [whole[:cut] + rest for cut, rest in zip(cuts, rests, strict=True)] == [whole] * len(
        cuts
    )


@pytest.mark.parametrize("emitted", [0, 9])
def test_prefill_and_decode_engines_together_draw_what_one_engine_draws(folder, emitted):
    prompt = text_prompt(30, seed=5)
    params = sampling("all", top_logprobs=3)
    with running(folder) as client:
        (whole,) = client.run([request("whole", prompt, sampling=params)])
        tokens = prompt + whole[:emitted]
        client.engine.submit(
            request(
                "prefill",
                tokens,
                sampling=params,
                emitted_count=emitted,
                mode=RequestMode.PREFILL_ONLY,
            )
        )
        first = client.wait("prefill", PrefillDone)
        assert len(first.top_logprobs.token_ids) == 3
        rest = client.run(
            [
                request(
                    "decode",
                    tokens,
                    sampling=params,
                    emitted_count=emitted,
                    mode=RequestMode.PREFILLED,
                    block_ids=client.hand_over(first, "prefill"),
                    first_token=first.token_id,
                )
            ]
        )[0]
    assert [*whole[:emitted], first.token_id, *rest] == whole


def test_top_log_probabilities_equal_transformers_before_penalties(folder, model):
    prompt = text_prompt(33, seed=2)
    count = 5
    with running(folder) as client:
        params = sampling("all", top_logprobs=count)
        (answer,) = client.run([request("r", prompt, sampling=params)])
        events = [event for event in client.events["r"] if isinstance(event, NewTokens)]
    tops = [top for event in events for top in event.top_logprobs]
    logprobs = [value for event in events for value in event.logprobs]
    with torch.inference_mode():
        logits = model(torch.tensor([prompt + answer])).logits[0, len(prompt) - 1 : -1].float()
    reference = logits.log_softmax(-1)
    best = reference.topk(count)
    assert len(tops) == len(logprobs) == TOKENS
    for position, top in enumerate(tops):
        assert list(top.token_ids) == best.indices[position].tolist()
        assert list(top.logprobs) == pytest.approx(best.values[position].tolist(), abs=1e-4)
    raw = Reference(folder, vision=False).logprobs(prompt + answer, TOKENS)
    assert logprobs == pytest.approx(raw, abs=1e-4)


def test_a_request_without_top_logprobs_gets_none_beside_one_with(folder):
    with running(folder) as client:
        client.run(
            [
                request(
                    name, text_prompt(9), sampling=SamplingParams(top_logprobs=top, max_tokens=4)
                )
                for name, top in (("with", 2), ("without", 0))
            ]
        )
        for name, sizes in (("with", {2}), ("without", set())):
            events = [event for event in client.events[name] if isinstance(event, NewTokens)]
            assert {len(top.token_ids) for event in events for top in event.top_logprobs} == sizes


@pytest.mark.parametrize(
    ("bad", "field"),
    [
        ({"frequency_penalty": 2.1}, "frequency_penalty"),
        ({"presence_penalty": float("nan")}, "presence_penalty"),
        ({"repetition_penalty": 0.0}, "repetition_penalty"),
        ({"top_logprobs": 21}, "top_logprobs"),
        ({"logit_bias": ((3, 101.0),)}, "logit_bias[3]"),
        ({"logit_bias": ((10**6, 1.0),)}, "logit_bias"),
    ],
)
def test_values_out_of_range_are_refused_by_name(folder, bad, field):
    with running(folder) as client, pytest.raises(InvalidRequestError) as refused:
        client.engine.submit(request("r", text_prompt(4), sampling=SamplingParams(**bad)))
    assert refused.value.field == f"sampling.{field}"
