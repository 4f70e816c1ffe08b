"""Decode begins while KV still arrives: the same tokens, or a typed error and none at all."""

import asyncio
import dataclasses
from pathlib import Path

import pytest

from epd.engine.requests import SamplingParams
from epd.errors import DataLossError, EpdError, TransferFailedError
from tests.decode.pair import EnginePair, engine_pair, outcome
from tests.engine.harness import text_prompt
from tests.handover.sides import eventually
from tests.support.tiny_model import make_tiny_llama
from tests.transfer.held import HELD

#: WRITEs of a prompt of one chunk: three layers, then the seal.
LAST_LAYER, SEAL = 3, 4
PROMPT = text_prompt(43)
WHOLE_BLOCKS = text_prompt(40)
SAMPLINGS = [
    SamplingParams(max_tokens=12, ignore_eos=True),
    SamplingParams(max_tokens=12, temperature=1.0, seed=5, ignore_eos=True),
]
GREEDY = SAMPLINGS[0]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_llama(tmp_path_factory.mktemp("llama"))


def early(pair: EnginePair) -> tuple[int, int, int]:
    stats = pair.engine.stats()
    return stats.early_steps, stats.early_committed, stats.early_late


async def answer(
    pair: EnginePair, prompt: list[int], sampling: SamplingParams, *, held: bool = False
) -> list[int]:
    """The tokens; what is held is let go once decode has begun."""
    asked = pair.ask(prompt, sampling)
    if held:
        await pair.early_step()
        pair.let_go()
    first = await asked.prefill
    await asked.decode
    return [first, *asked.tokens]


@pytest.mark.parametrize("sampling", SAMPLINGS)
@pytest.mark.parametrize("held", [LAST_LAYER, SEAL])
async def test_tokens_are_the_same_with_a_layer_or_the_seal_on_its_way(
    model: Path, sampling: SamplingParams, held: int
) -> None:
    async with engine_pair(model, early_start=False) as pair:
        expected = await answer(pair, PROMPT, sampling)
        assert pair.control.count("announce") == 0
        assert early(pair) == (0, 0, 0)
    async with engine_pair(model) as pair:
        pair.faults.late[held] = HELD
        assert await answer(pair, PROMPT, sampling, held=True) == expected
        assert early(pair) == (1, 1, 0)
        await pair.idle()


async def test_many_at_once_over_a_slow_wire_get_the_same_tokens(model: Path) -> None:
    prompts = [text_prompt(20 + 13 * n, seed=n) for n in range(8)]
    async with engine_pair(model, early_start=False) as pair:
        expected = [await answer(pair, prompt, SAMPLINGS[1]) for prompt in prompts]
    async with engine_pair(model) as pair:
        pair.faults.rate = 2e6
        found = await asyncio.gather(*(answer(pair, one, SAMPLINGS[1]) for one in prompts))
        assert found == expected
        begun, committed, late = early(pair)
        assert begun == committed + late > 0
        await pair.idle()


async def test_off_layers_are_not_followed_and_leave_together(model: Path) -> None:
    async with engine_pair(model, early_start=False) as pair:
        reservation = await pair.control.reserve("t", 43)
        assert not reservation.layer_notices
        lease = pair.receiver.leases.get("t")
        assert lease is not None
        assert lease.arrival is None
    async with engine_pair(model) as pair:
        assert (await pair.control.reserve("t", 43)).layer_notices


@pytest.mark.parametrize("last", [LAST_LAYER, SEAL])
async def test_a_last_write_that_fails_after_an_early_step_gives_an_error_and_no_token(
    model: Path, last: int
) -> None:
    async with engine_pair(model) as pair:
        pair.faults.late[last] = HELD
        pair.faults.fail_running.add(last)
        asked = pair.ask(WHOLE_BLOCKS, GREEDY)
        await pair.early_step()
        pair.let_go()
        assert isinstance(await outcome(asked), TransferFailedError)
        assert asked.tokens == []
        assert early(pair) == (1, 0, int(last == LAST_LAYER))
        await pair.idle()
        await answer(pair, PROMPT, GREEDY)


async def test_corrupted_kv_under_an_early_step_is_data_loss_and_no_token(model: Path) -> None:
    async with engine_pair(model, checksum=True) as pair:
        pair.faults.corrupt.add(LAST_LAYER)
        pair.faults.late[SEAL] = HELD
        asked = pair.ask(WHOLE_BLOCKS, GREEDY)
        await pair.early_step()
        pair.let_go()
        assert isinstance(await outcome(asked), DataLossError)
        assert asked.tokens == []
        assert early(pair) == (1, 0, 0)
        await pair.idle()


async def test_checksums_hold_after_an_early_step_and_none_is_begun_in_a_pushed_block(
    model: Path,
) -> None:
    async with engine_pair(model, checksum=True) as pair:
        pair.faults.late[SEAL] = HELD
        await answer(pair, WHOLE_BLOCKS, GREEDY, held=True)
        assert early(pair) == (1, 1, 0)
        await answer(pair, PROMPT, GREEDY)
        assert early(pair) == (1, 1, 0)
        await pair.idle()


@pytest.mark.parametrize(("wrong_token", "wrong_count"), [(1, 0), (0, -1)])
async def test_a_seal_that_says_something_else_than_was_announced_is_data_loss(
    model: Path, monkeypatch: pytest.MonkeyPatch, wrong_token: int, wrong_count: int
) -> None:
    async with engine_pair(model) as pair:
        truly = pair.receiver.announce

        def wrongly(name: str, generation: int, token: int, count: int) -> None:
            truly(name, generation, token + wrong_token, count + wrong_count)

        monkeypatch.setattr(pair.receiver, "announce", wrongly)
        pair.faults.late[SEAL] = 0.2
        asked = pair.ask(WHOLE_BLOCKS, GREEDY)
        assert isinstance(await outcome(asked), DataLossError)
        assert asked.tokens == []
        await pair.idle()


async def test_an_announcement_that_comes_behind_the_seal_begins_nothing(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with engine_pair(model) as pair:

        async def behind(name: str, generation: int, token: int, count: int) -> None:
            await eventually(lambda: (one := pair.receiver.leases.get(name)) and one.record)
            pair.receiver.announce(name, generation, token + 1, count)

        monkeypatch.setattr(pair.control, "announce", behind)
        pair.faults.late[LAST_LAYER] = 0.3  # the seal overtakes it
        await answer(pair, WHOLE_BLOCKS, GREEDY)
        assert early(pair) == (0, 0, 0)
        await pair.idle()


@pytest.mark.parametrize("held", [LAST_LAYER, SEAL])
async def test_a_cancel_during_an_early_step_leaks_nothing(model: Path, held: int) -> None:
    async with engine_pair(model) as pair:
        pair.faults.late[held] = HELD
        asked = pair.ask(WHOLE_BLOCKS, GREEDY)
        await eventually(lambda: lent(pair))
        asked.decode.cancel()
        await asyncio.wait({asked.decode})
        assert asked.tokens == []
        assert not lent(pair), "the engine has let go"
        pair.let_go()
        await outcome_of_prefill(asked.prefill)
        await pair.idle()


async def test_a_lease_that_expires_during_an_early_step_gives_an_error_and_leaks_nothing(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def unheard(transfer_ids: list[str]) -> list[str]:
        return []

    async with engine_pair(model) as pair:
        monkeypatch.setattr(pair.control, "renew", unheard)
        pair.faults.late[LAST_LAYER] = HELD
        asked = pair.ask(WHOLE_BLOCKS, GREEDY)
        await pair.early_step()
        leases = pair.receiver.leases
        leases._config = dataclasses.replace(leases._config, progress_timeout_s=0.3)
        with pytest.raises(EpdError):
            await asked.decode
        assert asked.tokens == []
        assert early(pair) == (1, 0, 1)
        pair.let_go()
        await outcome_of_prefill(asked.prefill)
        await pair.idle()


async def test_a_peer_that_is_lost_during_an_early_step_gives_an_error_and_no_token(
    model: Path,
) -> None:
    async with engine_pair(model) as pair:
        pair.faults.late[SEAL] = HELD
        asked = pair.ask(WHOLE_BLOCKS, GREEDY)
        await eventually(lambda: early(pair) == (1, 0, 0))
        pair.receiver.peer_gone(pair.control.sender_instance_id)
        with pytest.raises(Exception, match="lost during the KV push"):
            await asked.decode
        assert asked.tokens == []
        pair.let_go()
        pair.receiver.leases.check_integrity()
        await outcome_of_prefill(asked.prefill)


def lent(pair: EnginePair) -> bool:
    return any(lease.lent for lease in pair.receiver.leases._all())


async def outcome_of_prefill(prefill: asyncio.Task[int]) -> None:
    await asyncio.wait({prefill})
    prefill.exception()
