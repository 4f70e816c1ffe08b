"""Fleets kept for several tests: starting one costs seconds."""

import contextlib
from pathlib import Path
from typing import Any

from tests.support.fleet import TestFleet, fleet_of


class SharedFleets:
    """One running fleet at a time, so that fleets do not compete for the cores.

    A test that kills or stops processes takes :func:`fleet_of` instead.
    """

    def __init__(self) -> None:
        self._key: tuple[Any, ...] | None = None
        self._stack = contextlib.ExitStack()
        self._fleet: TestFleet | None = None

    def get(self, model: Path, **options: Any) -> TestFleet:
        """The fleet with these options of :func:`fleet_of`; another one is stopped first.

        A fleet with an ended process is replaced.
        """
        key = (str(model), repr(sorted(options.items())))
        alive = self._fleet is not None and all(
            process.running for process in self._fleet.processes.values()
        )
        if key != self._key or not alive:
            self.close()
            self._fleet = self._stack.enter_context(fleet_of(model, **options))
            self._key = key
        assert self._fleet is not None
        return self._fleet

    def logs(self) -> str:
        """The end of the running fleet's logs."""
        return self._fleet.logs() if self._fleet else ""

    def close(self) -> None:
        """Stops the running fleet."""
        self._fleet, self._key = None, None
        self._stack.close()
