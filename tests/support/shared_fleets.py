"""Fleets kept for several tests: starting one costs seconds."""

import contextlib
from pathlib import Path
from typing import Any

from tests.support.fleet import TestFleet, fleet_of


class SharedFleets:
    """A plain fleet of one model for the whole session, and beside it one other at a time.

    An idle fleet takes memory and hardly any time of a core. A test that kills or stops processes
    takes :func:`fleet_of` instead.
    """

    def __init__(self) -> None:
        self._plain = _Kept()
        self._other = _Kept()

    def get(self, model: Path, **options: Any) -> TestFleet:
        """The fleet with these options of :func:`fleet_of`.

        Another one with options is stopped first; a fleet with an ended process is replaced.
        """
        is_plain = not options and self._plain.model in (None, model)
        return (self._plain if is_plain else self._other).get(model, options)

    def logs(self) -> str:
        """The end of the running fleets' logs."""
        return self._plain.logs() + self._other.logs()

    def close(self) -> None:
        """Stops the running fleets."""
        self._other.close()
        self._plain.close()


class _Kept:
    """A place for one fleet."""

    def __init__(self) -> None:
        self.model: Path | None = None
        self._options: dict[str, Any] = {}
        self._fleet: TestFleet | None = None
        self._stack = contextlib.ExitStack()

    def get(self, model: Path, options: dict[str, Any]) -> TestFleet:
        """The fleet with these options, instead of the one here if that is another."""
        alive = self._fleet is not None and all(
            process.running for process in self._fleet.processes.values()
        )
        if not alive or (model, options) != (self.model, self._options):
            self.close()
            self._fleet = self._stack.enter_context(fleet_of(model, **options))
            self.model, self._options = model, options
        assert self._fleet is not None
        return self._fleet

    def logs(self) -> str:
        return self._fleet.logs() if self._fleet else ""

    def close(self) -> None:
        self._fleet, self.model = None, None
        self._stack.close()
