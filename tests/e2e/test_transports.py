"""One image request over each transport, between real processes."""

import asyncio

import pytest
from rich.console import Console

from epd.cli.status import read_status, status_table
from tests.e2e.test_bytes_moved import KV_BYTES, scrape_after, scrape_at_rest
from tests.support.ask import ask, generate_request, greedy
from tests.support.fleet import fleet_of
from tests.support.questions import make_questions

pytestmark = pytest.mark.timeout(600)

#: What carries the bytes of each transport between processes of one machine.
CARRIERS = {"nixl": "shm", "collective": "gloo", "mooncake": "tcp"}
ROLES = ("encoder", "prefill", "decode")


@pytest.fixture(autouse=True)
def patience(monkeypatch):
    """Of ``epd status`` with workers that have other things to do."""
    monkeypatch.setattr("epd.cli.status.TIMEOUT_S", 60.0)


@pytest.fixture
def question():
    return make_questions(2, seed=41)[1]


async def check_answer(fleet, open_channel, reference, question):
    channel = open_channel(fleet.router_address)
    answer = await ask(channel, generate_request(question, greedy(6)))
    assert answer.token_ids == reference.greedy(question, 6)
    assert answer.completion.usage.image_tokens > 0


async def status(fleet, role=""):
    """The lines of ``epd status`` about a role."""
    _, workers = await read_status(fleet.router_address)
    console = Console(width=200, record=True)
    with console.capture() as captured:
        console.print(status_table(workers))
    return [line for line in captured.get().splitlines() if role in line]


async def check_carriers(fleet, transport, carrier):
    """In ``epd status`` and in the metrics of both sides of the hand-over."""
    for role in ("prefill", "decode"):
        async with asyncio.timeout(60):  # it is known a moment after the first transfer
            while not any(f" {transport} ({carrier}) " in one for one in await status(fleet, role)):
                await asyncio.sleep(0.1)
        scraped = fleet.scrape(f"{role}-0")
        name = "epd_transfer_carrier"
        labels = {"epd_transfer_transport": transport, "epd_transfer_carrier": carrier}
        assert scraped.total(name, **labels) == scraped.total(name) == 1


@pytest.mark.parametrize("transport", ["nixl", "collective", "mooncake"])
async def test_an_image_request_is_answered_over_each_transport(
    transport, model, reference, shared_fleets, open_channel, question
):
    flags = dict.fromkeys(ROLES, ("--transport", transport))
    # NIXL is what every other test's fleet uses.
    fleet = shared_fleets.get(model, **({} if transport == "nixl" else {"flags": flags}))
    idle = fleet.idle_level()
    before = await scrape_at_rest(fleet, "prefill-0")
    await check_answer(fleet, open_channel, reference, question)
    fleet.assert_back_to_idle(idle, settled_within_s=15.0)
    after = await scrape_after(fleet, "prefill-0", before, 1)
    assert after.total(KV_BYTES) > before.total(KV_BYTES)
    await check_carriers(fleet, transport, CARRIERS[transport])


@pytest.mark.parametrize(
    ("allowed", "carrier"),
    [
        ("tcp", "tcp"),
        # Configured is not used: UCX's shared memory segments notice no dead peer, so without
        # reads of the other process's memory (cma) it takes TCP.
        pytest.param("posix,sysv,tcp", "tcp", marks=pytest.mark.full),
    ],
)
async def test_what_ucx_really_uses_is_shown_not_what_it_may_use(
    allowed, carrier, model, open_channel, question, reference
):
    with fleet_of(model, environment={"UCX_TLS": allowed}) as fleet:
        await check_answer(fleet, open_channel, reference, question)
        await check_carriers(fleet, "nixl", carrier)


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
        fleet.assert_back_to_idle(idle, settled_within_s=15.0)
        assert "over collective" in fleet.logs()
