"""Faults that last until the test has seen what it wanted to see meanwhile."""

import math
import threading

from epd.transfer.faulty_backend import FaultyBackend

#: How long a transfer is held up that the test lets go itself: no machine is too slow for that.
HELD = math.inf


class HeldBackend(FaultyBackend):
    """Faults of ``HELD`` seconds last until :meth:`let_go`."""

    def __init__(self, inner, faults):
        super().__init__(inner, faults)
        self._lock = threading.Lock()  # what counts as posted can be let go
        self._posted = []

    def write(self, agent_name, local, remote, notice):
        with self._lock:
            self._posted.append(super().write(agent_name, local, remote, notice))
            return self._posted[-1]

    def read(self, agent_name, local, remote, notice):
        with self._lock:
            self._posted.append(super().read(agent_name, local, remote, notice))
            return self._posted[-1]

    def let_go(self):
        """Lets everything end that was posted. Any thread."""
        with self._lock:
            for handle in self._posted:
                handle.not_before = 0.0
