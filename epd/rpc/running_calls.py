"""Calls that still run when a server's grace period is over end with a status, not with a cut."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import grpc

from epd.errors import EpdError
from epd.rpc.aliases import RpcMethodHandler, ServicerContext
from epd.rpc.handlers import wrap_handler

Continuation = Callable[[grpc.HandlerCallDetails], Awaitable[RpcMethodHandler]]


class RunningCalls(grpc.aio.ServerInterceptor):  # type: ignore[type-arg]
    """Knows the calls inside the handlers. The innermost interceptor: the others see its error."""

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[Any]] = set()
        self._reason: EpdError | None = None

    async def intercept_service(
        self, continuation: Continuation, details: grpc.HandlerCallDetails
    ) -> RpcMethodHandler:
        """Wraps every handler."""
        handler = await continuation(details)
        return handler and wrap_handler(handler, self._call)

    def end(self, reason: EpdError) -> None:
        """Makes every call end with ``reason``, those that come later too."""
        self._reason = reason
        for task in self._tasks:
            task.cancel()

    @contextlib.asynccontextmanager
    async def _call(self, request: Any, context: ServicerContext) -> AsyncIterator[None]:
        if self._reason is not None:
            raise self._reason.with_traceback(None)
        task = asyncio.current_task()
        assert task is not None, "gRPC runs handlers in tasks"
        self._tasks.add(task)
        try:
            yield
        except asyncio.CancelledError:
            if self._reason is None:
                raise
            task.uncancel()
            raise self._reason.with_traceback(None) from None
        finally:
            self._tasks.discard(task)
