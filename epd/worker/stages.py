"""The stages of one request: how long each took, and a span for each."""

import asyncio
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from opentelemetry.context import get_current
from opentelemetry.trace import Tracer

from epd.errors import EpdError
from epd.telemetry.spans import Attribute, record_stage


class Stages:
    """Made in the request's handler, whose span becomes the parent of every stage.

    ``durations_ns`` is what goes back to the router: nanoseconds by stage, all from this process's
    monotonic clock.
    """

    def __init__(self, tracer: Tracer) -> None:
        self.durations_ns: dict[str, int] = {}
        self._started_ns = time.monotonic_ns()
        self._tracer = tracer
        self._parent = get_current()

    def service_ns(self) -> int:
        """Time since the handler started: what the caller waits for longer is spent on the way."""
        return time.monotonic_ns() - self._started_ns

    def add(
        self,
        name: str,
        start_ns: int,
        end_ns: int,
        attributes: Mapping[str, Attribute] | None = None,
        error: BaseException | None = None,
    ) -> None:
        """Counts and records a stage that has ended; ``time.monotonic_ns`` at both ends."""
        self.count(name, end_ns - start_ns)
        self.record(name, start_ns, end_ns, attributes, error)

    def record(
        self,
        name: str,
        start_ns: int,
        end_ns: int,
        attributes: Mapping[str, Attribute] | None = None,
        error: BaseException | None = None,
    ) -> None:
        """A span alone, of what goes on beside a stage that counts."""
        record_stage(
            self._tracer,
            name,
            start_ns=start_ns,
            end_ns=end_ns,
            parent=self._parent,
            attributes=attributes,
            error_type=None if error is None else error_type(error),
        )

    def count(self, name: str, duration_ns: int) -> None:
        """Adds to a stage without a span: one too short for it, or one that has another's."""
        self.durations_ns[name] = self.durations_ns.get(name, 0) + duration_ns

    @contextmanager
    def stage(self, name: str) -> Iterator[dict[str, Attribute]]:
        """Records the stage that is left, however it is left; fill attributes in on the way."""
        start_ns = time.monotonic_ns()
        attributes: dict[str, Attribute] = {}
        try:
            yield attributes
        except BaseException as error:
            self.add(name, start_ns, time.monotonic_ns(), attributes, error)
            raise
        self.add(name, start_ns, time.monotonic_ns(), attributes)


def error_type(error: BaseException) -> str:
    """What a span's ``error.type`` says: the stable reason where there is one."""
    if isinstance(error, EpdError):
        return error.reason
    if isinstance(error, asyncio.CancelledError):
        return "CANCELLED"
    return type(error).__name__
