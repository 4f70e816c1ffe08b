"""Every feature level of an image comes over the wire and out of the cache."""

import pytest

from tests.support.ask import ask, generate_request, greedy
from tests.support.questions import make_questions
from tests.support.reference import Reference
from tests.support.tiny_model import make_tiny_qwen3vl

pytestmark = [pytest.mark.timeout(600), pytest.mark.full]
TOKENS = 24


@pytest.fixture(scope="module")
def deepstack_model(tmp_path_factory):
    return make_tiny_qwen3vl(tmp_path_factory.mktemp("tiny-qwen3vl"))


@pytest.mark.parametrize(
    "fleet_options", [{}, {"encoders": 0, "prefills": 0, "decodes": 0, "unified": 1}]
)
async def test_answers_of_a_model_with_feature_levels_equal_transformers_generate(
    deepstack_model, shared_fleets, open_channel, fleet_options
):
    reference = Reference(deepstack_model)
    channel = open_channel(shared_fleets.get(deepstack_model, **fleet_options).router_address)
    for question in make_questions(6, seed=5):
        expected = reference.greedy(question, TOKENS)
        for _ in range(2):  # the second time out of the caches
            answer = await ask(channel, generate_request(question, greedy(TOKENS)))
            assert answer.token_ids == expected, question.text[:80]
