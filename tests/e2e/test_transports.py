"""One image request over each transport, between real processes."""

import pytest

from tests.support.ask import ask, generate_request, greedy
from tests.support.fleet import fleet_of
from tests.support.questions import make_questions

pytestmark = pytest.mark.timeout(600)

ROLES = ("encoder", "prefill", "decode")
KV_BYTES = "epd_kv_transfer_io_bytes_total"


@pytest.fixture
def question():
    return make_questions(2, seed=41)[1]


async def check_answer(fleet, open_channel, reference, question):
    channel = open_channel(fleet.router_address)
    answer = await ask(channel, generate_request(question, greedy(6)))
    assert answer.token_ids == reference.greedy(question, 6)
    assert answer.completion.usage.image_tokens > 0


@pytest.mark.parametrize("transport", ["nixl", "collective", "mooncake"])
async def test_an_image_request_is_answered_over_each_transport(
    transport, model, reference, shared_fleets, open_channel, question
):
    flags = dict.fromkeys(ROLES, ("--transport", transport))
    # NIXL is what every other test's fleet uses.
    fleet = shared_fleets.get(model, **({} if transport == "nixl" else {"flags": flags}))
    idle = fleet.idle_level()
    before = fleet.scrape("prefill-0").total(KV_BYTES)
    await check_answer(fleet, open_channel, reference, question)
    fleet.assert_back_to_idle(idle, 5.0, settled_within_s=10.0)
    assert fleet.scrape("prefill-0").total(KV_BYTES) > before


async def test_a_unified_worker_needs_no_transport_but_local(
    model, reference, open_channel, question
):
    flags = {"decode": ("--transport", "local")}
    with fleet_of(model, encoders=0, prefills=0, decodes=0, unified=1, flags=flags) as fleet:
        await check_answer(fleet, open_channel, reference, question)


async def test_in_a_mixed_fleet_each_pair_uses_what_both_have(
    model, reference, open_channel, question
):
    """Embeddings come over NIXL, KV goes over collective: decode has nothing else."""
    flags = {
        "encoder": ("--transport", "mooncake,nixl"),
        "prefill": ("--transport", "nixl,collective"),
        "decode": ("--transport", "collective"),
    }
    with fleet_of(model, flags=flags) as fleet:
        idle = fleet.idle_level()
        await check_answer(fleet, open_channel, reference, question)
        fleet.assert_back_to_idle(idle, 5.0, settled_within_s=10.0)
        assert "over collective" in fleet.logs()
