"""Constrained output follows its grammar, whatever the model wants, wherever a request runs."""

import dataclasses
import json
import re

import pytest
import torch
from transformers import AutoModelForCausalLM

from epd.engine.grammar import GrammarCompiler
from epd.engine.requests import Finished, PrefillDone, RequestMode, SamplingParams
from epd.errors import InvalidRequestError, UnsupportedFeatureError
from epd.sampling import Constraint, ConstraintKind, FinishReason
from epd.text.tokenizer import Tokenizer
from tests.engine.harness import request, running, text_prompt

SCHEMA = json.dumps(
    {
        "type": "object",
        "properties": {
            "name": {"type": "string", "maxLength": 8},
            "kind": {"enum": ["circle", "square"]},
            "sizes": {"type": "array", "items": {"type": "integer", "maximum": 99}, "maxItems": 3},
        },
        "required": ["name", "kind", "sizes"],
        "additionalProperties": False,
    }
)


def schema(text=SCHEMA):
    return Constraint(ConstraintKind.JSON_SCHEMA, text)


def regex(text):
    return Constraint(ConstraintKind.REGEX, text)


def constrained(client, name, constraint, prompt=None, emitted=(), **sampling):
    """A request with the matcher that a service would bring along."""
    params = SamplingParams(**{"max_tokens": 200, "constraint": constraint, **sampling})
    return request(
        name,
        [*(prompt or text_prompt(19)), *emitted],
        sampling=params,
        emitted_count=len(emitted),
        matcher=client.engine.grammars.compile(constraint, emitted),
    )


@pytest.fixture(scope="module")
def folder(tiny_llama):
    return tiny_llama


@pytest.fixture(scope="module")
def text_of(folder):
    return Tokenizer.from_folder(folder).decode


def test_a_random_model_writes_json_of_the_schema(folder, text_of):
    with running(folder) as client:
        answers = client.run(
            constrained(client, f"r{seed}", schema(), temperature=float(seed > 0), seed=seed)
            for seed in range(6)
        )
        reasons = {client.wait(f"r{seed}", Finished).reason for seed in range(6)}
        client.assert_idle()
    assert reasons == {FinishReason.STOP}
    for answer in answers:
        found = json.loads(text_of(answer))
        assert list(found) == ["name", "kind", "sizes"]
        assert found["kind"] in ("circle", "square")
        assert len(found["name"]) <= 8
        assert len(found["sizes"]) <= 3
        assert all(size <= 99 for size in found["sizes"])
    assert len({tuple(answer) for answer in answers}) > 1


def test_greedy_tokens_under_a_grammar_equal_transformers_with_the_same_tokens_allowed(folder):
    prompt = text_prompt(23, seed=4)
    tokenizer = Tokenizer.from_folder(folder)
    letters = [tokenizer.encode(letter)[0] for letter in "abcdefgh"]
    model = AutoModelForCausalLM.from_pretrained(folder).eval()
    with running(folder) as client:
        end = sorted(client.engine.family.end_token_ids)
        (answer,) = client.run([constrained(client, "r", regex("[a-h]{12}"), prompt)])
    ids = torch.tensor([prompt])
    with torch.inference_mode():
        output = model.generate(
            input_ids=ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=30,
            do_sample=False,
            eos_token_id=end,
            prefix_allowed_tokens_fn=lambda _, seen: (
                letters if len(seen) < len(prompt) + 12 else end
            ),
        )
    assert answer == output[0, len(prompt) :].tolist()
    assert len(answer) == 13


def test_a_replay_from_any_token_goes_on_under_the_same_grammar(folder):
    with running(folder) as client:
        (whole,) = client.run([constrained(client, "r", schema(), temperature=1.0, seed=9)])
        cuts = range(1, len(whole))
        rests = client.run(
            constrained(client, f"from {cut}", schema(), None, whole[:cut], temperature=1.0, seed=9)
            for cut in cuts
        )
    assert [whole[:cut] + rest for cut, rest in zip(cuts, rests, strict=True)] == [whole] * len(
        cuts
    )


def test_prefill_and_decode_follow_one_grammar(folder):
    prompt = text_prompt(30, seed=5)
    with running(folder) as client:
        (whole,) = client.run([constrained(client, "whole", schema(), prompt)])
        half = constrained(client, "prefill", schema(), prompt)
        client.engine.submit(dataclasses.replace(half, mode=RequestMode.PREFILL_ONLY))
        first = client.wait("prefill", PrefillDone)
        rest = dataclasses.replace(
            constrained(client, "decode", schema(), prompt),
            mode=RequestMode.PREFILLED,
            block_ids=client.hand_over(first, "prefill"),
            first_token=first.token_id,
        )
        (tail,) = client.run([rest])
    assert [first.token_id, *tail] == whole


def test_requests_without_a_grammar_are_untouched_by_one_beside_them(folder):
    plain = request("plain", text_prompt(19), 24)
    with running(folder) as client:
        (alone,) = client.run([plain])
        beside = request("beside", text_prompt(19), 24)
        together = client.run([beside, constrained(client, "r", regex("[0-9]{20}"))])
    assert together[0] == alone


@pytest.mark.parametrize(
    "bad", [regex("((("), schema('{"type": "nonsense"}'), schema("{"), schema('"text"')]
)
def test_a_malformed_grammar_is_refused_when_it_is_compiled(folder, bad):
    with running(folder) as client, pytest.raises(InvalidRequestError) as refused:
        client.engine.grammars.compile(bad, ())
    assert refused.value.field == "sampling.constraint"


def test_emitted_tokens_that_do_not_follow_the_grammar_are_refused(folder):
    with running(folder) as client, pytest.raises(InvalidRequestError):
        client.engine.grammars.compile(regex("[0-9]+"), text_prompt(3))


@pytest.mark.parametrize("more", [{"min_tokens": 1}, {"ignore_eos": True}])
def test_a_grammar_does_not_go_with_what_keeps_an_answer_from_ending(folder, more):
    with running(folder) as client, pytest.raises(InvalidRequestError):
        client.engine.submit(constrained(client, "r", regex("a+"), **more))


def test_a_model_without_end_tokens_cannot_be_constrained(folder):
    with pytest.raises(UnsupportedFeatureError):
        GrammarCompiler(folder, 300, frozenset()).compile(regex("a"), ())


def test_text_of_any_language_stays_whole_characters(folder, text_of):
    with running(folder) as client:
        (answer,) = client.run([constrained(client, "r", regex("[数学é🙂]{6}"), temperature=1.0)])
    assert re.fullmatch("[数学é🙂]{6}", text_of(answer))
