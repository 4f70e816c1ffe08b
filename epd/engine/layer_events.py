"""The layer hook on a device that is behind its host."""

import queue
import threading
from collections.abc import Callable
from typing import Any

import torch

#: Marks a place in the device's work; what it returns waits until the device has come there.
Record = Callable[[], Callable[[], None]]
LayerCall = Callable[[int], None]


def record_on_stream(device: torch.device) -> Callable[[], None]:
    """An event on the stream that this thread's kernels for a device go to."""
    # Blocking: whoever waits sleeps and keeps no core busy.
    event: Any = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
    # The device by name: without it, it would be the stream of the thread's current device.
    event.record(torch.cuda.current_stream(device))
    wait: Callable[[], None] = event.synchronize
    return wait


class LayerEvents:
    """Calls a hook for each layer once the device has written that layer's KV.

    On a GPU a step only queues kernels: where it comes to a layer's hook, nothing is in the pool
    yet. A thread of its own waits for the event of each layer, in order, and makes the call then;
    the step goes on meanwhile and ends with :meth:`finish`. Driven by one thread.

    Args:
        record: See :data:`Record`.
    """

    def __init__(self, record: Record) -> None:
        self._record = record
        self._due: queue.Queue[tuple[Callable[[], None], LayerCall, int]] = queue.Queue()
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._main, name="layer-events", daemon=True)
        self._thread.start()

    def follow(self, hook: LayerCall) -> LayerCall:
        """The hook for a step: returns at once, is called when the layer is there."""
        return lambda layer: self._due.put((self._record(), hook, layer))

    def finish(self) -> None:
        """Waits until all calls of the step are made; raises what the first that failed raised."""
        self._due.join()
        error, self._error = self._error, None
        if error is not None:
            raise error

    def _main(self) -> None:
        while True:
            wait, hook, layer = self._due.get()
            try:
                if self._error is None:
                    wait()
                    hook(layer)
            except BaseException as error:
                self._error = error
            finally:
                self._due.task_done()
