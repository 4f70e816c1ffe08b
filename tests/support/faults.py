"""Faults of whole processes, for tests with a fleet."""

import contextlib
import signal
from collections.abc import Iterator

from tests.support.fleet import TestFleet


@contextlib.contextmanager
def frozen(fleet: TestFleet, *names: str) -> Iterator[None]:
    """Processes that answer nothing inside and go on afterwards, if they still live.

    Shorter than the silence after which peers take them for gone (10 s), it is a hang that passes.
    """
    for name in names:
        fleet.signal(name, signal.SIGSTOP)
    try:
        yield
    finally:
        for name in names:
            if fleet.process(name).running:
                fleet.signal(name, signal.SIGCONT)
