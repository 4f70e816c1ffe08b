"""Tokens between the engine, which does not wait, and a stream that may be slow."""

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator
from types import TracebackType

from epd.engine.requests import EngineEvent, NewTokens
from epd.errors import ResourceExhaustedError


class TokenBuffer:
    """An engine's events, with tokens that pile up joined into one event.

    A message costs the same for one token and for sixteen, so a stream that falls behind catches
    up by itself. One that does not read at all is ended. Use as an async context manager; leaving
    it closes the engine's iterator, which cancels a request that still runs.

    Args:
        events: Of one request.
        max_tokens: Most tokens held.
    """

    def __init__(self, events: AsyncGenerator[EngineEvent, None], max_tokens: int) -> None:
        self._events = events
        self._max_tokens = max_tokens
        self._held: deque[EngineEvent] = deque()
        self._held_tokens = 0
        self._wake = asyncio.Event()
        self._pump: asyncio.Task[None] | None = None

    async def __aenter__(self) -> "TokenBuffer":
        self._pump = asyncio.create_task(self._fill())
        self._pump.add_done_callback(lambda _: self._wake.set())
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        assert self._pump is not None
        self._pump.cancel()
        await asyncio.gather(self._pump, return_exceptions=True)

    async def __aiter__(self) -> AsyncIterator[EngineEvent]:
        """Events in order.

        Raises:
            ResourceExhaustedError: too many tokens piled up.
        """
        assert self._pump is not None
        while True:
            while self._held:
                event = self._held.popleft()
                if isinstance(event, NewTokens):
                    self._held_tokens -= len(event.token_ids)
                yield event
            if self._pump.done():
                self._pump.result()
                return
            self._wake.clear()
            await self._wake.wait()

    async def _fill(self) -> None:
        try:
            async for event in self._events:
                self._put(event)
                self._wake.set()
        finally:
            await self._events.aclose()

    def _put(self, event: EngineEvent) -> None:
        if isinstance(event, NewTokens):
            self._held_tokens += len(event.token_ids)
            if self._held_tokens > self._max_tokens:
                raise ResourceExhaustedError(
                    f"the stream's reader is more than {self._max_tokens} tokens behind",
                    reason="SLOW_READER",
                )
            if self._held and isinstance(before := self._held[-1], NewTokens):
                self._held[-1] = NewTokens(
                    before.token_ids + event.token_ids,
                    before.logprobs + event.logprobs,
                    before.top_logprobs + event.top_logprobs,
                )
                return
        self._held.append(event)
