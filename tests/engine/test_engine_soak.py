"""Random company: mixed modes, cancels at random moments, too little memory for all."""

import dataclasses
import random
from pathlib import Path

import pytest

from epd.engine.requests import (
    EngineEvent,
    EngineRequest,
    Failed,
    Finished,
    Preempted,
    PrefillDone,
    RequestMode,
    SamplingParams,
)
from epd.errors import RequestCancelledError
from tests.engine.harness import LAST, eventually, request, running, text_prompt


@pytest.mark.parametrize("prefix_cache", [False, True])
def test_whoever_finishes_has_its_own_tokens_and_nothing_leaks(
    tiny_llama: Path, prefix_cache: bool
) -> None:
    rng = random.Random(1)
    requests = [make_request(rng, index) for index in range(60)]
    with running(tiny_llama) as client:
        baseline = dict(zip([r.request_id for r in requests], client.run(requests), strict=True))
    with running(
        tiny_llama, num_blocks=24, max_running=6, headroom_blocks=0, prefix_cache=prefix_cache
    ) as client:
        engine = client.engine
        for made in requests:
            prefill_only = rng.random() < 0.3
            mode = RequestMode.PREFILL_ONLY if prefill_only else RequestMode.FULL
            engine.submit(dataclasses.replace(made, mode=mode))
            if rng.random() < 0.3:
                engine.cancel(rng.choice(requests).request_id)
            if rng.random() < 0.3:
                client.pump()
        outcomes: list[type] = []
        running_names = {made.request_id for made in requests}
        while running_names:
            for name in sorted(running_names):
                last = client.events.get(name, [None])[-1]
                if not isinstance(last, LAST):
                    continue
                running_names.discard(name)
                outcomes.append(type(last))
                engine.release(name)
                check_outcome(last, client.tokens(name), baseline[name])
            if running_names:
                client.pump()
        assert {Finished, PrefillDone} <= set(outcomes) <= set(LAST)
        assert outcomes.count(Preempted) == engine.stats().preemptions
        eventually(lambda: engine.stats().held_requests == 0)
        client.assert_idle()


def check_outcome(last: EngineEvent, tokens: list[int], baseline: list[int]) -> None:
    """Tokens, as far as they came, are those of the request run in peace."""
    if isinstance(last, Finished):
        assert tokens == baseline
    elif isinstance(last, PrefillDone):
        assert last.token_id == baseline[0]
    else:
        assert tokens == baseline[: len(tokens)]
    if isinstance(last, Failed):
        assert isinstance(last.error, RequestCancelledError)


def make_request(rng: random.Random, index: int) -> EngineRequest:
    sampling = SamplingParams(
        temperature=rng.choice([0.0, 0.8]),
        top_k=rng.choice([0, 20]),
        seed=index,
        max_tokens=rng.randint(2, 40),
        ignore_eos=True,
    )
    # Few seeds, so that prompts share prefixes.
    prompt = text_prompt(100, seed=rng.randrange(4))[: rng.randint(1, 100)]
    return request(f"r{index}", prompt, sampling=sampling)
