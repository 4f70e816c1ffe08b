"""One embedding in the making. All calls that want the image wait for the same one."""

import asyncio
import time
from collections.abc import Callable
from dataclasses import replace

from epd.encoding.embedding_cache import CacheEntry
from epd.encoding.encode_events import Stage
from epd.errors import EpdError, InvalidRequestError
from epd.media import Media


class Production:
    """Single-flight: the state of one image's encoding and the calls that wait for it.

    A call that is cancelled leaves the others undisturbed. When the last one has gone, the encoder
    cancels ``task``.
    """

    def __init__(self, entry: CacheEntry, data: Media) -> None:
        self.entry = entry
        self.data = data
        self.task: asyncio.Task[None] | None = None
        self.started_ns = time.monotonic_ns()
        self.stages: tuple[Stage, ...] = ()
        self._end: asyncio.Future[EpdError | None] = asyncio.get_running_loop().create_future()

    def finish(self, error: EpdError | None) -> None:
        """Lets every waiting call go on, or fail with ``error``."""
        if not self._end.done():
            self._end.set_result(error)

    def stages_since(self, joined_ns: int) -> tuple[Stage, ...]:
        """The stages as a call saw them that waits since ``joined_ns``, perhaps joining late."""
        return tuple(
            replace(stage, start_ns=max(stage.start_ns, joined_ns))
            for stage in self.stages
            if stage.end_ns > joined_ns
        )

    def when_finished(self, callback: Callable[[], None]) -> None:
        """Calls back on the event loop once it is finished, soon when it is already."""
        self._end.add_done_callback(lambda end: callback())

    async def wait(self) -> None:
        """Returns once it is finished."""
        await asyncio.shield(self._end)

    def check(self, field: str) -> None:
        """Raises why a finished production failed: for each call its own error instance, naming
        the image as that call knows it."""
        error = self._end.result()
        if error is None:
            return
        message = f"{field}: {error.message}"
        if isinstance(error, InvalidRequestError):
            raise InvalidRequestError(
                message, field=field, reason=error.reason, metadata=error.metadata
            )
        raise type(error)(message, reason=error.reason, metadata=error.metadata)
