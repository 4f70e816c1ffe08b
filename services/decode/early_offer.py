"""A request that the engine may begin while its KV still arrives."""

import asyncio
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from types import TracebackType

from epd.cleanup import CleanupTasks
from epd.engine.async_engine import AsyncEngine
from epd.engine.requests import EngineEvent, EngineRequest
from epd.errors import EpdError
from epd.handover.arriving_transfer import ArrivingTransfer
from epd.handover.receiver import KvReceiver


class EarlyOffer:
    """Hands a request to the engine once waiting for the rest of its KV would take less than a
    step, on blocks that stay the transfer's. Use as an async context manager: leaving it before
    :meth:`sealed` takes the request back, and the blocks are the transfer's alone again as soon as
    the engine has let go of them.

    Args:
        engine: Begins.
        receiver: Takes the KV in.
        tasks: Keeps the offer until the engine has let go, whatever becomes of the caller.
        transfer_id: The attempt.
        make_request: The request over arriving KV.
    """

    def __init__(
        self,
        engine: AsyncEngine,
        receiver: KvReceiver,
        tasks: CleanupTasks,
        transfer_id: str,
        make_request: Callable[[ArrivingTransfer], EngineRequest],
    ) -> None:
        self._engine = engine
        self._receiver = receiver
        self._tasks = tasks
        self._transfer_id = transfer_id
        self._make_request = make_request
        self._events: AsyncGenerator[EngineEvent, None] | None = None
        self._first: EngineEvent | None = None
        self._task: asyncio.Task[None] | None = None

    async def __aenter__(self) -> "EarlyOffer":
        self._task = self._tasks.spawn(self._run())
        return self

    def sealed(self) -> AsyncGenerator[EngineEvent, None] | None:
        """The KV is complete, in order and taken: the request's events if the engine has it, which
        then owns the blocks too; None if it has not, and will not get it from here.

        Raises:
            EpdError: the engine has ended the request; the blocks are the caller's.
        """
        assert self._task is not None
        if self._events is None:
            self._task.cancel()
            return None
        self._engine.engine.sealed(self._transfer_id)
        return self._follow(self._task, self._events)

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        assert self._task is not None
        self._task.cancel()
        await asyncio.wait({self._task})

    async def _run(self) -> None:
        await self._receiver.wait_startable(
            self._transfer_id, lambda: self._engine.engine.decode_step_s
        )
        arriving = self._receiver.lend(self._transfer_id)
        if arriving is None:
            return
        self._events = self._engine.generate(self._make_request(arriving))
        stuck = False
        try:
            # Submits before it waits: nothing can come between lending and the engine.
            self._first = await anext(self._events)
        except EpdError:
            self._events = None  # refused, as it will be once the KV is complete
        except TimeoutError:
            stuck = True  # in a step on the blocks: they stay set aside
            raise
        finally:
            if not stuck:
                self._receiver.give_back(self._transfer_id)

    async def _follow(
        self, task: asyncio.Task[None], events: AsyncGenerator[EngineEvent, None]
    ) -> AsyncGenerator[EngineEvent, None]:
        async with aclosing(events):
            await task
            assert self._first is not None
            yield self._first
            async for event in events:
                yield event
