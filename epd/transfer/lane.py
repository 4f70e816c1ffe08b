"""A thread for the calls of a transfer library that block."""

import contextlib
import queue
import threading
from collections.abc import Callable

from epd.errors import TransferFailedError


class LaneCall:
    """A blocking call under way. ``done`` turns True once it has returned, whatever came of it."""

    def __init__(self, function: Callable[[], None]) -> None:
        self.done = False
        #: Why it failed; valid once ``done``.
        self.error: str | None = None
        self._function: Callable[[], None] | None = function

    def run(self) -> None:
        """Makes the call, on the lane's thread."""
        assert self._function is not None
        try:
            self._function()
        except Exception as error:
            self.error = str(error) or repr(error)
        finally:
            self._function = None  # with it go the buffers it held
            self.done = True

    def give_up(self, reason: str) -> None:
        """Fails a call that has not begun and never will."""
        self.error, self._function = reason, None
        self.done = True


class Lane:
    """Calls for one peer, one after the other, so that a peer that hangs holds up only itself.

    Args:
        name: Of the thread.
        limit: Most calls that may wait.
    """

    def __init__(self, name: str, limit: int = 1024) -> None:
        self._limit = limit
        self._calls: queue.SimpleQueue[LaneCall | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._main, name=name, daemon=True)
        self._thread.start()

    def call(self, function: Callable[[], None]) -> LaneCall:
        """Queues a call; any exception of it is its failure.

        Raises:
            TransferFailedError: too many calls wait already.
        """
        if self._calls.qsize() >= self._limit:
            raise TransferFailedError(f"{self._limit} calls wait already")
        call = LaneCall(function)
        self._calls.put(call)
        return call

    def close(self) -> None:
        """Ends the thread after the calls that are queued; does not wait for it."""
        self._calls.put(None)

    def give_up(self, reason: str) -> None:
        """Fails the calls that have not begun and ends the thread after the one that has."""
        with contextlib.suppress(queue.Empty):
            while (call := self._calls.get_nowait()) is not None:
                call.give_up(reason)
        self.close()

    def _main(self) -> None:
        while (call := self._calls.get()) is not None:
            call.run()
            del call  # else its buffers live until the next one comes
