"""Threads and tasks a worker cannot do without: when one dies, the worker says so."""

import asyncio
import logging
from collections.abc import Callable, Coroutine
from typing import Any

from epd.rpc.server import GrpcServer

_log = logging.getLogger(__name__)


class Upkeep:
    """Runs background tasks and turns health to NOT_SERVING when one of them, or a thread, fails.

    A worker whose gRPC server still answers while its engine or data plane is dead would otherwise
    go on attracting requests. Use as an async context manager on the event loop; leaving it cancels
    the tasks.
    """

    def __init__(self, server: GrpcServer) -> None:
        self._server = server
        self._loop = asyncio.get_running_loop()
        self._tasks: set[asyncio.Task[None]] = set()

    async def __aenter__(self) -> "Upkeep":
        return self

    async def __aexit__(self, *_: object) -> None:
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def run(self, name: str, work: Coroutine[Any, Any, None]) -> None:
        """Keeps a task running that never ends by itself."""
        task = asyncio.create_task(work, name=name)
        self._tasks.add(task)
        task.add_done_callback(self._on_done)

    def thread_death(self, name: str) -> Callable[[BaseException], None]:
        """A callback for a thread to call with what killed it, on that thread."""

        def died(cause: BaseException) -> None:
            self._loop.call_soon_threadsafe(self._fail, name, cause)

        return died

    def _on_done(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled():
            cause = task.exception() or RuntimeError("it ended")
            self._fail(task.get_name(), cause)

    def _fail(self, name: str, cause: BaseException) -> None:
        _log.error("%s died", name, exc_info=cause)
        telling = asyncio.create_task(self._server.fail(f"{name} died: {cause!r}"))
        self._tasks.add(telling)
        telling.add_done_callback(self._tasks.discard)
