"""Work that must be done even when the request it belongs to is cancelled."""

import asyncio
import logging
from collections.abc import Coroutine
from typing import Any

_log = logging.getLogger(__name__)


class CleanupTasks:
    """Keeps background tasks alive until they end, and logs those that fail.

    Whoever spawns a task bounds its duration.
    """

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[None]] = set()

    def __len__(self) -> int:
        return len(self._tasks)

    def spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Starts the work."""
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._done)
        return task

    async def drain(self, timeout_s: float) -> None:
        """Waits for everything that runs, then cancels what is left."""
        if not self._tasks:
            return
        _, left = await asyncio.wait(self._tasks, timeout=timeout_s)
        for task in left:
            task.cancel()

    def _done(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            _log.error("clean-up failed", exc_info=error)


async def cancel_and_wait(*tasks: asyncio.Task[Any]) -> None:
    """Cancels tasks and waits until they have ended; their errors are of no interest any more."""
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


def raise_if_cancelled() -> None:
    """Ends this task when it has been asked to end.

    For loops that go on after a TaskGroup has failed: before Python 3.13 a group that waits for its
    children because one of them failed forgets a cancellation that comes meanwhile.
    """
    task = asyncio.current_task()
    if task is not None and task.cancelling():
        raise asyncio.CancelledError
