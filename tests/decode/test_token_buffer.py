"""Tokens between an engine that does not wait and a stream that may be slow."""

import asyncio
from collections.abc import AsyncGenerator

import pytest

from epd.engine.requests import EngineEvent, Finished, NewTokens
from epd.errors import ResourceExhaustedError
from epd.sampling import FinishReason
from services.decode.token_buffer import TokenBuffer

END = Finished(FinishReason.LENGTH, 5, 0, 0, 0)


class Source:
    """Emits tokens 0, 1, 2… one per turn of the event loop, then the end."""

    def __init__(self, count: int) -> None:
        self.emitted = 0
        self.closed = False
        self._count = count

    async def events(self) -> AsyncGenerator[EngineEvent, None]:
        try:
            for token in range(self._count):
                await asyncio.sleep(0)
                self.emitted += 1
                yield NewTokens((token,), (-1.0,))
            yield END
        finally:
            self.closed = True


async def test_tokens_that_pile_up_come_as_one_event_and_in_order() -> None:
    source = Source(20)
    async with TokenBuffer(source.events(), max_tokens=64) as buffer:
        seen: list[EngineEvent] = []
        async for event in buffer:
            seen.append(event)
            while source.emitted < 20:
                await asyncio.sleep(0)
    tokens = [t for event in seen if isinstance(event, NewTokens) for t in event.token_ids]
    assert tokens == list(range(20))
    assert len(seen) < 6
    assert seen[-1] == END


async def test_a_reader_that_is_too_far_behind_is_ended_and_the_request_closed() -> None:
    source = Source(1000)
    async with TokenBuffer(source.events(), max_tokens=16) as buffer:
        while not source.closed:
            await asyncio.sleep(0)
        with pytest.raises(ResourceExhaustedError) as refusal:
            async for _ in buffer:
                pass
    assert refusal.value.reason == "SLOW_READER"
    assert source.closed
    assert source.emitted == 17


async def test_leaving_early_closes_the_request() -> None:
    source = Source(10**9)
    async with TokenBuffer(source.events(), max_tokens=1 << 30) as buffer:
        async for _ in buffer:
            break
    assert source.closed
