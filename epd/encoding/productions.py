"""All embeddings in the making: each is made once, however many calls wait for it."""

import asyncio
import logging
import time
from collections.abc import Callable

from epd.encoding.embedding_cache import CacheEntry, EmbeddingCache, EntryState
from epd.encoding.embedding_source import EmbeddingSource
from epd.encoding.encode_events import Stage
from epd.encoding.production import Production
from epd.errors import (
    DeadlineExceededError,
    EpdError,
    InternalError,
    RequestCancelledError,
    UnavailableError,
)
from epd.media import Media
from epd.telemetry import semconv

logger = logging.getLogger(__name__)


class Productions:
    """Fills cache entries and keeps their accounts right, whatever happens. On the event loop.

    Args:
        source: Fills entries.
        cache: Owner of the entries.
        timeout_s: Longest time until the calls that wait hear of an end.
        changed: Called after each end.
    """

    def __init__(
        self,
        source: EmbeddingSource,
        cache: EmbeddingCache,
        timeout_s: float,
        changed: Callable[[], None],
    ) -> None:
        self._source = source
        self._cache = cache
        self._timeout_s = timeout_s
        self._changed = changed
        self._running: dict[CacheEntry, Production] = {}
        self._closed = False

    def __len__(self) -> int:
        return len(self._running)

    def __getitem__(self, entry: CacheEntry) -> Production:
        return self._running[entry]

    @property
    def patches(self) -> int:
        """Patches of all images in the making; may be called from any thread."""
        grids = [entry.spec.plan.grid for entry in list(self._running)]
        return sum(temporal * height * width for temporal, height, width in grids)

    def start(self, entry: CacheEntry, data: Media) -> None:
        """Begins to fill a FILLING entry with the embedding of an image file."""
        production = Production(entry, data)
        self._running[entry] = production
        production.task = asyncio.create_task(self._run(production))

    def abandon(self, entry: CacheEntry) -> None:
        """Stops filling an entry that was withdrawn; its memory is freed as soon as possible."""
        task = self._running[entry].task
        assert task is not None
        task.cancel()

    def close(self) -> None:
        """From now on an interrupted production means that the encoder stops."""
        self._closed = True

    async def stop(self) -> None:
        """Ends what is left, once the source has stopped."""
        tasks = [one.task for one in self._running.values() if one.task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _run(self, production: Production) -> None:
        """Waiting calls hear of the end when the accounts are right."""
        entry = production.entry
        overdue = asyncio.get_running_loop().call_later(self._timeout_s, self._give_up, production)
        error: EpdError | None = None
        begun = Stage(semconv.SPAN_QUEUE, production.started_ns, time.monotonic_ns())
        try:
            production.stages = (begun, *await self._source.fill(entry, production.data))
        except asyncio.CancelledError:
            error = RequestCancelledError("nobody waits for the image any more")
            if self._closed:
                error = UnavailableError("the encoder has stopped", reason="ENCODER_STOPPED")
        except EpdError as raised:
            error = raised
        except Exception as raised:
            logger.exception("encoding failed")
            error = InternalError(f"encoding failed: {raised!r}")
        overdue.cancel()
        del self._running[entry]
        if error is None and entry.state is EntryState.FILLING:
            self._cache.complete(entry)
            self._source.keep(entry)
        else:
            if entry.state is EntryState.FILLING:
                self._cache.withdraw(entry)
            self._cache.discard(entry)
        production.finish(error)
        self._changed()

    def _give_up(self, production: Production) -> None:
        """Fails the waiting calls in time, even when the vision tower hangs with the memory."""
        if production.entry.state is EntryState.FILLING:
            self._cache.withdraw(production.entry)
            production.finish(
                DeadlineExceededError(
                    f"not encoded within {self._timeout_s:g} s", reason="ENCODE_TIMEOUT"
                )
            )
            self.abandon(production.entry)
