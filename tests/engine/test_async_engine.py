"""The asyncio face: order, early closing, refusals."""

import asyncio
import dataclasses
import threading
from collections.abc import AsyncIterator
from contextlib import aclosing, asynccontextmanager
from pathlib import Path

import pytest

from epd.engine.async_engine import AsyncEngine
from epd.engine.build import build_engine
from epd.engine.requests import (
    Admitted,
    EngineEvent,
    Failed,
    Finished,
    NewTokens,
    RequestMode,
    SamplingParams,
)
from epd.errors import DuplicateRequestError, UnavailableError
from tests.engine.harness import SMALL, Reference, request, text_prompt

ENDLESS = SamplingParams(max_tokens=3000, ignore_eos=True)


@asynccontextmanager
async def started(folder: Path) -> AsyncIterator[AsyncEngine]:
    engine = AsyncEngine(build_engine(folder, SMALL, "digest"))
    engine.start()
    try:
        yield engine
    finally:
        assert await engine.stop()
        engine.engine.pool.check_integrity()


def assert_let_go(engine: AsyncEngine) -> None:
    """Nothing runs, and not because an endless request has come to its end."""
    stats = engine.engine.stats()
    assert (stats.running_requests, stats.free_blocks) == (0, stats.total_blocks)
    assert stats.output_tokens < ENDLESS.max_tokens


async def test_concurrent_streams_get_their_own_events_in_order(tiny_llama: Path) -> None:
    reference = Reference(tiny_llama, vision=False)
    prompts = [text_prompt(10 + i, seed=i) for i in range(5)]

    async def tokens(engine: AsyncEngine, index: int) -> list[int]:
        made = request(f"r{index}", prompts[index], 20)
        events: list[EngineEvent] = [event async for event in engine.generate(made)]
        assert isinstance(events[0], Admitted)
        assert isinstance(events[-1], Finished)
        assert all(isinstance(event, NewTokens) for event in events[1:-1])
        return [t for e in events if isinstance(e, NewTokens) for t in e.token_ids]

    async with started(tiny_llama) as engine:
        got = await asyncio.gather(*(tokens(engine, i) for i in range(5)))
    assert got == [reference.generate_text(prompt, 20) for prompt in prompts]


async def test_closing_early_cancels_and_returns_when_the_engine_has_let_go(
    tiny_llama: Path,
) -> None:
    async with started(tiny_llama) as engine:
        made = request("r", text_prompt(50), sampling=ENDLESS)
        async with aclosing(engine.generate(made)) as events:
            async for event in events:
                if isinstance(event, NewTokens):
                    break
        assert_let_go(engine)
        # The id is free again at once.
        async for event in engine.generate(dataclasses.replace(made, sampling=SamplingParams())):
            last = event
        assert isinstance(last, Finished)


async def test_a_cancelled_task_leaves_nothing_behind(tiny_llama: Path) -> None:
    async with started(tiny_llama) as engine:
        begun = asyncio.Event()

        async def consume() -> None:
            made = request("r", text_prompt(50), sampling=ENDLESS)
            async with aclosing(engine.generate(made)) as events:
                async for _ in events:
                    begun.set()

        task = asyncio.create_task(consume())
        await begun.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert_let_go(engine)


async def test_a_task_cancelled_again_waits_for_the_running_step_all_the_same(
    tiny_llama: Path,
) -> None:
    """Else the embeddings that the step computes on would be another request's already."""
    in_a_step, go_on = threading.Event(), threading.Event()

    def hold(layer: int, progress: object) -> None:
        in_a_step.set()
        go_on.wait(60)

    engine = AsyncEngine(build_engine(tiny_llama, SMALL, "digest", hold))
    engine.start()

    async def consume() -> None:
        made = request("r", text_prompt(50))
        made = dataclasses.replace(made, mode=RequestMode.PREFILL_ONLY)
        async with aclosing(engine.generate(made)) as events:
            async for _ in events:
                pass

    task = asyncio.create_task(consume())
    try:
        assert await asyncio.to_thread(in_a_step.wait, 60)
        for _ in range(3):
            task.cancel()
            for _ in range(10):
                await asyncio.sleep(0)
            assert not task.done()
        go_on.set()
        with pytest.raises(asyncio.CancelledError):
            await task
        engine.engine.release("r")
    finally:
        go_on.set()
        assert await engine.stop()
    engine.engine.pool.check_integrity()


async def test_a_refused_duplicate_does_not_disturb_the_live_request(tiny_llama: Path) -> None:
    async with started(tiny_llama) as engine:
        made = request("r", text_prompt(50), 20)
        events = engine.generate(made)
        await anext(events)
        with pytest.raises(DuplicateRequestError):
            await anext(engine.generate(made))
        rest = [event async for event in events]
        assert isinstance(rest[-1], Finished)


async def test_streams_end_with_failed_when_the_engine_stops(tiny_llama: Path) -> None:
    async with started(tiny_llama) as engine:
        events = engine.generate(request("r", text_prompt(50), sampling=ENDLESS))
        await anext(events)
        assert await engine.stop()
        last = [event async for event in events][-1]
        assert isinstance(last, Failed)
        assert isinstance(last.error, UnavailableError)
        with pytest.raises(UnavailableError):
            await anext(engine.generate(request("late", [1])))
