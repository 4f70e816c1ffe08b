"""Forced faults of the data plane, for tests only. Nothing in the services makes one of these."""

import ctypes
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from epd.errors import TransferFailedError
from epd.transfer.base import (
    AgentDescriptor,
    Segment,
    TransferBackend,
    TransferHandle,
    TransferResult,
    TransferState,
)


@dataclass
class Faults:
    """Which transfers go wrong; WRITEs and notices count from 1 over the backend's life.

    ``fail_post``: WRITEs that cannot be posted. ``fail_running``: WRITEs that end as failed after
    they were posted. ``delay``: seconds a WRITE seems to run. ``drop_notice``: WRITEs whose notice
    never arrives. ``corrupt``: WRITEs whose first byte arrives inverted. ``fail_read``: READs that
    cannot be posted. ``die``: an exception that ends the agent thread at its next poll.
    """

    fail_post: set[int] = field(default_factory=set)
    fail_running: set[int] = field(default_factory=set)
    delay: dict[int, float] = field(default_factory=dict)
    drop_notice: set[int] = field(default_factory=set)
    corrupt: set[int] = field(default_factory=set)
    fail_read: set[int] = field(default_factory=set)
    delay_read: dict[int, float] = field(default_factory=dict)
    die: Exception | None = None
    writes: int = 0
    reads: int = 0


@dataclass
class _Doctored(TransferHandle):
    real: TransferHandle
    fails: bool = False
    not_before: float = 0.0
    #: Source byte to turn back when the WRITE is over.
    inverted: int | None = None


class FaultyBackend(TransferBackend):
    """A backend with :class:`Faults` in front of it."""

    def __init__(self, inner: TransferBackend, faults: Faults) -> None:
        self.name = inner.name
        self.capabilities = inner.capabilities
        self._inner = inner
        self._faults = faults

    def register(self, segment: Segment, memory_kind: str) -> None:
        self._inner.register(segment, memory_kind)

    def descriptor(self) -> AgentDescriptor:
        return self._inner.descriptor()

    def add_peer(self, peer: AgentDescriptor) -> None:
        self._inner.add_peer(peer)

    def remove_peer(self, agent_name: str) -> None:
        self._inner.remove_peer(agent_name)

    def write(
        self, agent_name: str, local: Sequence[Segment], remote: Sequence[Segment], notice: bytes
    ) -> TransferHandle:
        self._faults.writes += 1
        number = self._faults.writes
        if number in self._faults.fail_post:
            raise TransferFailedError(f"forced: WRITE {number} cannot be posted")
        inverted = local[0].address if number in self._faults.corrupt else None
        _invert(inverted)
        silent = self._faults.drop_notice | self._faults.fail_running
        kept = b"" if number in silent else notice
        real = self._inner.write(agent_name, local, remote, kept)
        return _Doctored(
            real,
            number in self._faults.fail_running,
            time.monotonic() + self._faults.delay.get(number, 0.0),
            inverted,
        )

    def read(
        self, agent_name: str, local: Sequence[Segment], remote: Sequence[Segment], notice: bytes
    ) -> TransferHandle:
        self._faults.reads += 1
        number = self._faults.reads
        if number in self._faults.fail_read:
            raise TransferFailedError(f"forced: READ {number} cannot be posted")
        until = time.monotonic() + self._faults.delay_read.get(number, 0.0)
        return _Doctored(self._inner.read(agent_name, local, remote, notice), not_before=until)

    def poll(self, handle: TransferHandle) -> TransferState:
        assert isinstance(handle, _Doctored)
        state = self._inner.poll(handle.real)
        if time.monotonic() < handle.not_before:
            return TransferState.RUNNING
        if state is TransferState.DONE and handle.fails:
            return TransferState.FAILED
        return state

    def finish(self, handle: TransferHandle) -> TransferResult:
        assert isinstance(handle, _Doctored)
        _invert(handle.inverted)
        return self._inner.finish(handle.real)

    def release(self, handle: TransferHandle) -> bool:
        assert isinstance(handle, _Doctored)
        return self._inner.release(handle.real)

    def notices(self) -> list[tuple[str, bytes]]:
        if self._faults.die is not None:
            raise self._faults.die
        return self._inner.notices()

    def close(self) -> None:
        self._inner.close()


def _invert(address: int | None) -> None:
    if address is not None:
        ctypes.c_uint8.from_address(address).value ^= 0xFF
