"""The READs of one request."""

import asyncio
from collections.abc import Sequence
from concurrent.futures import Future

from epd.errors import EpdError
from epd.transfer.agent import TransferAgent
from epd.transfer.base import Segment, TransferResult
from epd.transfer.job import UnreleasedTransferError


class ReadBatch:
    """Posts READs until closed, and knows whether any may still run.

    Owned by the event loop; the agent thread calls the guard.
    """

    def __init__(self, agent: TransferAgent) -> None:
        self._agent = agent
        self._closed: EpdError | None = None
        self._futures: list[Future[TransferResult]] = []

    @property
    def settled(self) -> bool:
        """No READ runs or waits to be posted."""
        return all(one.done() and _unreleased(one) is None for one in self._futures)

    def post(self, peer: str, local: Sequence[Segment], remote: Sequence[Segment]) -> None:
        """Queues one READ."""
        self._futures.append(self._agent.read(peer, local, remote, guard=self._guard))

    def close(self, error: EpdError) -> None:
        """Forbids new posts, also of READs in the queue."""
        self._closed = error

    async def first_failure(self) -> tuple[int, EpdError] | None:
        """Waits for all READs, or until one fails; that one's index and reason.

        Cancelling the wait cancels no READ.
        """
        waits = [asyncio.wrap_future(one) for one in self._futures]
        for wait in waits:
            wait.add_done_callback(_retrieve)
        if waits:
            await asyncio.wait(waits, return_when=asyncio.FIRST_EXCEPTION)
        for index, wait in enumerate(waits):
            error = wait.exception() if wait.done() else None
            if isinstance(error, EpdError):
                return index, error
        return None

    def results(self) -> list[TransferResult]:
        """What the READs did, in order, once all have succeeded."""
        return [one.result() for one in self._futures]

    async def drained(self) -> None:
        """Waits until no READ runs."""
        for one in self._futures:
            await asyncio.gather(asyncio.wrap_future(one), return_exceptions=True)
            unreleased = _unreleased(one)
            if unreleased is not None:
                await asyncio.wrap_future(unreleased.released)

    def _guard(self) -> None:
        if self._closed is not None:
            raise self._closed


def _retrieve(wait: asyncio.Future[TransferResult]) -> None:
    """Keeps asyncio from reporting the failure of a READ that nobody waits for any more."""
    if not wait.cancelled():
        wait.exception()


def _unreleased(future: Future[TransferResult]) -> UnreleasedTransferError | None:
    """Why the library still holds on to a READ that has failed, if it does."""
    if not future.done() or future.cancelled():
        return None
    error = future.exception()
    if isinstance(error, UnreleasedTransferError) and not error.released.done():
        return error
    return None
