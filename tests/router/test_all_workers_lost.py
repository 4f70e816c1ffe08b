"""An answer whose workers are all away for a moment goes on when they are back."""

import asyncio
from pathlib import Path

import pytest

from epd.errors import UnavailableError
from tests.router.fake_workers import Fabric, FakeDecode, FakePrefill, FakeWorker
from tests.router.harness import all_leave, answer_of, eventually, request, router, running
from tests.support.answer import collect

TOKENS = 8


def unified() -> tuple[FakeDecode, list[FakeWorker]]:
    """One that serves requests alone."""
    decode = FakeDecode(unified=True)
    return decode, [decode]


def pair() -> tuple[FakeDecode, list[FakeWorker]]:
    """A prefill and a decode worker, for texts."""
    fabric = Fabric()
    decode = FakeDecode(fabric)
    return decode, [FakePrefill(fabric), decode]


@pytest.mark.parametrize("made", [unified, pair])
async def test_an_answer_waits_for_its_workers_within_patience(model: Path, made) -> None:
    decode, workers = made()
    decode.token_s = 60  # it does not end before it is broken off
    settings = {"worker_patience_s": "30"}
    async with running(*workers), router(model, workers, **settings) as served:
        asked = asyncio.create_task(collect(served.stub.Generate(request(max_tokens=TOKENS))))
        await eventually(lambda: decode.open_calls == 1)
        await all_leave(served, workers)
        decode.token_s = 0.0
        await decode.break_calls(UnavailableError("restarting"))
        await eventually(lambda: not decode.open_calls)
        await asyncio.wait({asked}, timeout=0.5)
        for worker in workers:
            await worker.set_health(True)
        answer = await asked
    assert answer.token_ids == answer_of(0, TOKENS)
    assert answer.completion.attempt_count == 2
