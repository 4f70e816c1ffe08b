"""Workers that die: killed at every stage, restarted at the same address. Peers live on."""

import asyncio
import random
import re

import grpc
import pytest

from epd.errors import TransferFailedError, UnavailableError
from epd.rpc.status import error_from_rpc
from epd.v1 import router_pb2, router_pb2_grpc
from tests.support.ask import ask, generate_request, greedy, seeded
from tests.support.faults import frozen
from tests.support.fleet import QUARANTINE_HOLD_S, fleet_of
from tests.support.questions import make_long_video, make_questions
from tests.support.reference import Question

pytestmark = pytest.mark.timeout(900)

FLAGS = {
    "encoder": (f"--embedding-hold-s={QUARANTINE_HOLD_S}", "--embedding-lease-s=4"),
    "decode": (f"--quarantine-hold-s={QUARANTINE_HOLD_S}",),
}
#: Lease of an embedding nobody reads any more, then its hold.
SETTLED_S = 4.0 + QUARANTINE_HOLD_S + 15.0


@pytest.fixture(scope="module")
def fleet(model):
    """Two of each language worker: what one loses the other can take over."""
    with fleet_of(model, prefills=2, decodes=2, flags=FLAGS) as running:
        yield running


@pytest.fixture
def channel(fleet, open_channel):
    return open_channel(fleet.router_address)


async def restart(fleet, channel, name):
    """Starts an ended process again and waits until the router uses it."""
    address = (await asyncio.to_thread(fleet.restart, name)).address
    stub = router_pb2_grpc.RouterServiceStub(channel)
    async with asyncio.timeout(60):
        while True:
            workers = (await stub.GetModel(router_pb2.GetModelRequest())).workers
            if any(worker.address == address and worker.healthy for worker in workers):
                return
            await asyncio.sleep(0.05)


async def assert_answers(channel, reference, question, tokens=24):
    answer = await ask(channel, generate_request(question, greedy(tokens)))
    assert answer.token_ids == reference.greedy(question, tokens)


async def answered_or_typed(task, reference, question, tokens):
    """A request hit by a crash is replayed to the same answer or ends with a retryable status."""
    try:
        answer = await task
    except grpc.aio.AioRpcError as refusal:
        error = error_from_rpc(refusal)
        assert isinstance(error, UnavailableError | TransferFailedError), error
        return False
    assert answer.token_ids == reference.greedy(question, tokens)
    return True


async def start(channel, question, tokens):
    request = generate_request(question, greedy(tokens))
    task = asyncio.create_task(ask(channel, request))
    await asyncio.sleep(0)
    return task


async def busy(fleet, role, task, gauge="epd_kv_cache_block_usage"):
    """The name of the worker of a role that has the request; empty when it is over before."""
    names = [process.name for process in fleet.of_role(role) if process.running]
    async with asyncio.timeout(120):
        while not task.done():
            for name in names:
                if (await asyncio.to_thread(fleet.scrape, name)).total(gauge) > 0:
                    return name
            await asyncio.sleep(0.01)
    return ""


@pytest.mark.parametrize("role", ["prefill", "decode"])
async def test_a_worker_killed_while_it_works_costs_at_most_its_own_requests(
    role, fleet, channel, reference
):
    """Prefill: in the forward pass of a long prompt. Decode: while tokens stream.

    Decode's question has a video that in time reaches into the answer, which a replay has to place
    as the first attempt did.
    """
    tokens = 24 if role == "prefill" else 600
    text = "y" * 3000 if role == "prefill" else "short"
    videos = (make_long_video(random.Random(7)),) if role == "decode" else ()
    images = make_questions(2, seed=200 + len(role))[1].images
    idle = fleet.idle_level()
    for number in range(5):  # it may be over before it is seen
        question = Question(images, f"{number} {text}", videos)
        task = await start(channel, question, tokens)
        if victim := await busy(fleet, role, task):
            break
    assert victim
    others = {name: level for name, level in idle.items() if name != victim}
    fleet.kill_one(victim)
    assert await answered_or_typed(task, reference, question, tokens)
    await assert_answers(channel, reference, make_questions(2, seed=210)[1])
    fleet.assert_back_to_idle(others, within_s=SETTLED_S, settled_within_s=SETTLED_S)
    await restart(fleet, channel, victim)
    await assert_answers(channel, reference, make_questions(2, seed=211)[1])


@pytest.mark.parametrize("regex", ["", "[a-z ]{400}"])
async def test_a_penalised_drawn_answer_goes_on_unchanged_when_its_worker_is_killed(
    regex, fleet, channel
):
    """The replay counts emitted tokens as output: penalties, draws and logprobs stay the same.

    So does the grammar, which has gone on over them.
    """
    tokens = 400
    sampling = seeded(tokens, seed=5)
    if regex:
        sampling.constraint.regex = regex
        sampling.ignore_eos = False
    request = generate_request(make_questions(2, seed=260)[1], sampling)
    request.logprobs = True
    undisturbed = await ask(channel, request)
    for _ in range(5):
        task = asyncio.create_task(ask(channel, request))
        if not (victim := await busy(fleet, "decode", task)):
            continue
        fleet.kill_one(victim)
        answer = await task
        await restart(fleet, channel, victim)
        if answer.completion.attempt_count > 1:
            break
    else:
        pytest.fail("it was over before the kill each time")
    assert answer.token_ids == undisturbed.token_ids
    assert answer.logprobs == pytest.approx(undisturbed.logprobs, abs=1e-4)
    tops = [list(top.token_ids) for top in answer.top_logprobs]
    assert tops == [list(top.token_ids) for top in undisturbed.top_logprobs]
    assert len(tops) == tokens
    assert re.fullmatch(regex or "(?s:.*)", answer.text)


async def test_prefill_killed_while_decode_holds_its_reservation(fleet, channel, reference):
    """Decode answers Reserve only after prefill is dead: the blocks come back after the hold."""
    idle = fleet.idle_level()
    question = make_questions(2, seed=220)[1]
    decodes = [process.name for process in fleet.of_role("decode")]
    with frozen(fleet, *decodes):
        task = await start(channel, question, 24)
        victim = await busy(fleet, "prefill", task, "epd_request_running")
        fleet.kill_one(victim)
    assert await answered_or_typed(task, reference, question, 24)
    others = {name: level for name, level in idle.items() if name != victim}
    fleet.assert_back_to_idle(others, within_s=SETTLED_S, settled_within_s=SETTLED_S)
    await restart(fleet, channel, victim)
    await assert_answers(channel, reference, question)


async def test_the_encoder_killed_before_its_embedding_is_read(fleet, channel, reference):
    """Prefill is frozen while the encoder dies: the READ fails, nothing hangs."""
    idle = fleet.idle_level()
    question = make_questions(3, seed=230)[2]
    prefills = [process.name for process in fleet.of_role("prefill")]
    with frozen(fleet, *prefills):
        task = await start(channel, question, 24)
        async with asyncio.timeout(60):
            while not fleet.scrape("encoder-0").total("epd_transfer_open"):
                await asyncio.sleep(0.01)
        await asyncio.sleep(0.5)
        fleet.kill_one("encoder-0")
    await answered_or_typed(task, reference, question, 24)
    others = {name: level for name, level in idle.items() if name != "encoder-0"}
    fleet.assert_back_to_idle(others, within_s=SETTLED_S, settled_within_s=SETTLED_S)
    await restart(fleet, channel, "encoder-0")
    await assert_answers(channel, reference, question)


async def test_text_is_answered_while_no_encoder_lives(fleet, channel, reference):
    fleet.kill_one("encoder-0")
    try:
        await assert_answers(channel, reference, Question((), "no picture here"))
    finally:
        await restart(fleet, channel, "encoder-0")
    await assert_answers(channel, reference, make_questions(2, seed=240)[1])


@pytest.mark.parametrize("name", ["decode-0", "prefill-0"])
async def test_a_worker_restarted_five_times_at_its_address_is_a_new_peer_each_time(
    name, fleet, channel, reference, full_run
):
    other = name.replace("0", "1")
    fleet.kill_one(other)  # so that every request needs the restarted one
    try:
        for round_ in range(5 if full_run else 2):
            fleet.kill_one(name)
            await restart(fleet, channel, name)
            await assert_answers(channel, reference, make_questions(2, seed=250 + round_)[1])
    finally:
        await restart(fleet, channel, other)
    assert all(process.running for process in fleet.processes.values())
