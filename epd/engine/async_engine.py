"""The engine's face towards asyncio."""

import asyncio
from collections.abc import AsyncGenerator, Sequence

from epd.engine.engine import Engine
from epd.engine.grammar import Matcher
from epd.engine.requests import (
    EngineEvent,
    EngineRequest,
    Failed,
    Finished,
    Preempted,
    PrefillDone,
    SamplingParams,
)

#: After one of these nothing more comes.
LAST_EVENTS = (Finished, Preempted, Failed, PrefillDone)


class AsyncEngine:
    """Carries the events of each step to the event loop in one call.

    All methods belong to the loop on which :meth:`start` was called.
    """

    def __init__(self, engine: Engine, close_timeout_s: float = 30.0) -> None:
        self.engine = engine
        self._close_timeout_s = close_timeout_s
        # Not bounded by themselves: a request makes at most max_tokens + 3 events.
        self._queues: dict[str, asyncio.Queue[EngineEvent]] = {}
        self._loop: asyncio.AbstractEventLoop | None = None

    def start(self) -> None:
        """Starts the engine; call it on the event loop."""
        self._loop = asyncio.get_running_loop()
        self.engine.start(self._deliver)

    async def stop(self, timeout_s: float = 10.0) -> bool:
        """Stops the engine as :meth:`Engine.stop` does."""
        return await asyncio.to_thread(self.engine.stop, timeout_s)

    async def matcher(self, sampling: SamplingParams, emitted: Sequence[int]) -> Matcher | None:
        """What a request with this sampling brings along; None where nothing constrains it.

        Raises:
            InvalidRequestError: the constraint is malformed, or ``emitted`` does not follow it.
            UnsupportedFeatureError: the model cannot be constrained.
        """
        if sampling.constraint is None:
            return None
        return await asyncio.to_thread(self.engine.grammars.compile, sampling.constraint, emitted)

    async def generate(self, request: EngineRequest) -> AsyncGenerator[EngineEvent, None]:
        """Submits a request and yields its events up to the last one.

        Closing the iterator early cancels the request and waits until the engine has let go of it
        (one step), so that the memory of its embeddings may be reused afterwards; a caller that is
        cancelled again meanwhile is held as well. Use ``contextlib.aclosing``. A Failed event is
        yielded, not raised.

        Raises:
            TimeoutError: on closing, the engine's step did not end within ``close_timeout_s``.
            EpdError: the engine refuses the request, as :meth:`Engine.submit` says.
        """
        queue: asyncio.Queue[EngineEvent] = asyncio.Queue()
        # Submit first: a refused duplicate must not take the live request's place.
        self.engine.submit(request)
        self._queues[request.request_id] = queue
        event: EngineEvent | None = None
        try:
            while not isinstance(event, LAST_EVENTS):
                event = await queue.get()
                yield event
        finally:
            try:
                if not isinstance(event, LAST_EVENTS):
                    self.engine.cancel(request.request_id)
                    await self._let_go(queue)
            finally:
                del self._queues[request.request_id]

    async def _let_go(self, queue: asyncio.Queue[EngineEvent]) -> None:
        """Waits for a request's last event, however often the caller is cancelled: a step that went
        on over memory of another request would publish wrong KV.
        """

        async def ended() -> None:
            async with asyncio.timeout(self._close_timeout_s):
                while not isinstance(await queue.get(), LAST_EVENTS):
                    pass

        ending = asyncio.create_task(ended())
        cancelled: asyncio.CancelledError | None = None
        while not ending.done():
            try:
                await asyncio.wait({ending})
            except asyncio.CancelledError as error:
                cancelled = error
        ending.result()
        if cancelled is not None:
            raise cancelled

    def _deliver(self, events: list[tuple[str, EngineEvent]]) -> None:
        assert self._loop is not None
        self._loop.call_soon_threadsafe(self._dispatch, events)

    def _dispatch(self, events: list[tuple[str, EngineEvent]]) -> None:
        for request_id, event in events:
            if queue := self._queues.get(request_id):
                queue.put_nowait(event)
