"""The calls inside a server: a drain waits for their end, and ends those that last too long."""

import asyncio
import contextlib
import functools
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import grpc

from epd.errors import EpdError
from epd.rpc.aliases import RpcMethodHandler, ServicerContext
from epd.rpc.drain_policy import is_work
from epd.rpc.handlers import wrap_handler

Continuation = Callable[[grpc.HandlerCallDetails], Awaitable[RpcMethodHandler]]


class RunningCalls(grpc.aio.ServerInterceptor):  # type: ignore[type-arg]
    """Knows the calls inside the handlers. The innermost interceptor: the others see its error."""

    def __init__(self) -> None:
        self._tasks: dict[asyncio.Task[Any], bool] = {}  # whether it does a request's work
        self._no_work: EpdError | None = None
        self._no_calls: EpdError | None = None

    @property
    def working(self) -> bool:
        """Whether a call runs that does a request's work; watches do none."""
        return any(self._tasks.values())

    def refuse_work(self, reason: EpdError) -> None:
        """From now on new requests get ``reason``; those that run can still end."""
        self._no_work = reason

    def end(self, reason: EpdError) -> None:
        """Makes every call end with ``reason``, a status and not a cut; later ones too."""
        self._no_calls = reason
        for task in self._tasks:
            task.cancel()

    async def intercept_service(
        self, continuation: Continuation, details: grpc.HandlerCallDetails
    ) -> RpcMethodHandler:
        """Wraps every handler."""
        handler = await continuation(details)
        work = is_work(details.method.removeprefix("/"))
        return handler and wrap_handler(handler, functools.partial(self._call, work))

    @contextlib.asynccontextmanager
    async def _call(
        self, work: bool, request: Any, context: ServicerContext
    ) -> AsyncIterator[None]:
        refusal = self._no_calls or (self._no_work if work else None)
        if refusal is not None:
            raise refusal.with_traceback(None)
        task = asyncio.current_task()
        assert task is not None, "gRPC runs handlers in tasks"
        self._tasks[task] = work
        try:
            yield
        except asyncio.CancelledError:
            if self._no_calls is None:
                raise
            task.uncancel()
            raise self._no_calls.with_traceback(None) from None
        finally:
            del self._tasks[task]
