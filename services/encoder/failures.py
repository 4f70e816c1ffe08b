"""Turns the death of a thread into NOT_SERVING."""

import asyncio
from collections.abc import Awaitable, Callable


class Failures:
    """Passes the first report on to the server's health; reports may come from any thread."""

    def __init__(self, fail: Callable[[str], Awaitable[None]]) -> None:
        self._fail = fail
        self._loop = asyncio.get_running_loop()
        self._reasons: asyncio.Queue[str] = asyncio.Queue()
        self._task = asyncio.create_task(self._run())

    def report(self, part: str, cause: BaseException) -> None:
        """``part`` of the service has died of ``cause``."""
        self._loop.call_soon_threadsafe(self._reasons.put_nowait, f"{part} died: {cause!r}")

    async def stop(self) -> None:
        """Ends the watch."""
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)

    async def _run(self) -> None:
        await self._fail(await self._reasons.get())
