"""Requests go where their prefix is cached, and popular prefixes spread."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from epd.block_hashes import block_hashes
from epd.v1 import router_pb2, worker_pb2
from tests.router.conftest import Fleet
from tests.router.fake_workers import FakePrefill, FakeWorker
from tests.router.harness import eventually, load_is_read, router, running
from tests.router.model_folder import token_ids
from tests.support.answer import collect

BLOCK_SIZE = 32


def prompt(text: str) -> router_pb2.GenerateRequest:
    """A raw prompt of one token per character."""
    message = router_pb2.GenerateRequest(text_prompt=text)
    message.sampling.max_tokens = 2
    return message


def document(number: int) -> str:
    """Twelve blocks that no other document begins with."""
    return f"{number:04d}" * (12 * BLOCK_SIZE // 4)


def hashes(text: str) -> list[bytes]:
    return block_hashes(token_ids(text), (), BLOCK_SIZE)


@pytest.mark.parametrize("concurrency", [1, 16])
async def test_f37_a_shared_system_prompt_does_not_herd_requests_to_one_worker(
    model: Path, fleet: Fleet, concurrency: int
) -> None:
    other = FakePrefill(fleet.fabric)
    fleet.prefill.token_s = other.token_s = 0.0001
    workers: list[FakeWorker] = [*fleet.workers, other]
    # One at a time it is chance alone: this many are uneven once in 100 000 runs.
    total = 500 if concurrency == 1 else 160
    async with running(*workers), router(model, workers) as served:
        slots = asyncio.Semaphore(concurrency)

        async def ask(number: int) -> None:
            async with slots:
                await collect(served.stub.Generate(prompt(document(0) + f"question {number}")))

        async with asyncio.TaskGroup() as group:
            for number in range(total):
                group.create_task(ask(number))
    assert 0.4 * total <= fleet.prefill.calls["Prefill"] <= 0.6 * total


@pytest.mark.parametrize("events", [True, False])
async def test_requests_about_one_document_go_to_the_worker_that_has_it(
    model: Path, fleet: Fleet, events: bool
) -> None:
    """The fakes tell nothing, so with events asked for the router falls back just the same."""
    prefills = [fleet.prefill, FakePrefill(fleet.fabric)]
    workers = [*fleet.workers, prefills[1]]
    for prefill in prefills:
        prefill.token_s = 0.0001
    settings = {"prefix_events": str(events)}
    async with running(*workers), router(model, workers, **settings) as served:
        for turn in range(4):
            for number in range(8):
                await collect(served.stub.Generate(prompt(document(number) + f"ask {turn}")))
    homes = [{tuple(call.token_ids[:4]) for call in p.requests} for p in prefills]
    assert len(homes[0]) + len(homes[1]) == 8, "a document was sent to both workers"


class Told:
    """What a fake worker tells of its cache, message by message."""

    def __init__(self) -> None:
        self.messages: asyncio.Queue[worker_pb2.WatchKvEventsResponse] = asyncio.Queue()
        #: Full lists that have gone out.
        self.lists = 0
        self.first: list[bytes] = []
        self.sequence = 10

    async def stream(self) -> AsyncIterator[worker_pb2.WatchKvEventsResponse]:
        yield self._message(self.sequence, self.first, cleared=True)
        self.lists += 1
        while True:
            yield await self.messages.get()

    def tell(self, sequence: int, stored: list[bytes]) -> None:
        self.messages.put_nowait(self._message(sequence, stored))

    @staticmethod
    def _message(
        sequence: int, stored: list[bytes], cleared: bool = False
    ) -> worker_pb2.WatchKvEventsResponse:
        return worker_pb2.WatchKvEventsResponse(
            sequence=sequence, stored_hashes=stored, cleared=cleared
        )


async def test_a_cached_prompt_goes_where_the_worker_says_it_is_and_a_gap_is_made_good(
    model: Path, fleet: Fleet
) -> None:
    told = Told()
    told.first = hashes(document(1))
    other = FakePrefill(fleet.fabric, kv_events=told.stream)
    workers = [*fleet.workers, other]
    async with running(*workers), router(model, workers) as served:
        await eventually(lambda: told.lists == 1)
        await load_is_read(other)
        await collect(served.stub.Generate(prompt(document(1) + "first")))
        assert other.calls["Prefill"] == 1
        told.first = hashes(document(2))
        told.sequence = 13
        told.tell(13, hashes(document(3)))  # 11 and 12 were lost
        await eventually(lambda: told.lists == 2)
        await load_is_read(other)
        await collect(served.stub.Generate(prompt(document(2) + "second")))
        assert other.calls["Prefill"] == 2


async def test_tokens_waiting_at_a_worker_outweigh_its_cache(model: Path, fleet: Fleet) -> None:
    """The holder has a long queue from elsewhere, and the prompt is short."""
    told = Told()
    told.first = hashes(document(1))
    holder = FakePrefill(fleet.fabric, kv_events=told.stream)
    holder.load.waiting_tokens = 100_000
    workers = [*fleet.workers, holder]
    async with running(*workers), router(model, workers) as served:
        await eventually(lambda: told.lists == 1)
        await load_is_read(holder)
        for number in range(5):
            await collect(served.stub.Generate(prompt(document(1) + f"{number}")))
    assert holder.calls["Prefill"] == 0


async def test_a_prompt_waits_where_it_is_cached_rather_than_be_computed_twice(
    model: Path, fleet: Fleet
) -> None:
    """The holder has as much to do first as the prompt would take elsewhere."""
    told = Told()
    told.first = hashes(document(1))
    holder = FakePrefill(fleet.fabric, kv_events=told.stream)
    holder.load.waiting_tokens = len(document(1)) * 5 // 4
    workers = [*fleet.workers, holder]
    async with running(*workers), router(model, workers) as served:
        await eventually(lambda: told.lists == 1)
        await load_is_read(holder)
        await collect(served.stub.Generate(prompt(document(1) + "question")))
    assert holder.calls["Prefill"] == 1
