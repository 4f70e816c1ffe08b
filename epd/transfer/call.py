"""A function of the backend on its way to the agent thread."""

from collections.abc import Callable
from concurrent.futures import Future
from typing import Generic, TypeVar

from epd.errors import EpdError
from epd.transfer.base import TransferBackend

T = TypeVar("T")


class BackendCall(Generic[T]):
    """Made by any thread, run by the agent thread; ``future`` tells what came of it."""

    def __init__(self, function: Callable[[TransferBackend], T]) -> None:
        self.future: Future[T] = Future()
        self._function = function

    def run(self, backend: TransferBackend) -> None:
        """Calls the function. Whatever it raises belongs to the caller: the thread lives on."""
        if not self.future.set_running_or_notify_cancel():
            return
        try:
            self.future.set_result(self._function(backend))
        except Exception as error:
            self.future.set_exception(error)

    def abandon(self, error: EpdError) -> None:
        """Fails the call, because the agent ends."""
        if self.future.set_running_or_notify_cancel():
            self.future.set_exception(error)
