"""A backend whose transfers go wrong on purpose. For tests only."""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from epd.errors import NotPostedError, TransferFailedError
from epd.transfer.base import (
    AgentDescriptor,
    Capabilities,
    ReceivePlan,
    Segment,
    TransferBackend,
    TransferHandle,
    TransferResult,
    TransferState,
)
from epd.transfer.buffer import HostBuffer
from epd.transfer.faults import Faults
from epd.transfer.segments import SegmentArray

#: Bytes that a corrupted WRITE changes: so many at random never happen to be the right ones.
_CHANGED_BYTES = 8

Post = Callable[[], TransferHandle]


@dataclass
class _Doctored(TransferHandle):
    #: None before a late WRITE is posted, and after it could not be.
    real: TransferHandle | None
    fails: bool = False
    not_before: float = 0.0
    #: To be posted at ``not_before``.
    late: Post | None = None
    #: To be posted when ``real`` is done, before anybody hears of it.
    then: Post | None = None
    #: What ``real`` did when there was a ``then``.
    result: TransferResult | None = None


class FaultyBackend(TransferBackend):
    """A backend with :class:`Faults` in front of it."""

    def __init__(self, inner: TransferBackend, faults: Faults) -> None:
        self.name = inner.name
        self.capabilities = inner.capabilities
        self._inner = inner
        self._faults = faults
        self._noise: HostBuffer | None = None

    def register(self, segment: Segment, memory_kind: str) -> None:
        self._inner.register(segment, memory_kind)

    def descriptor(self) -> AgentDescriptor:
        return self._inner.descriptor()

    def descriptors(self) -> list[AgentDescriptor]:
        return self._inner.descriptors()

    def transports(self) -> Mapping[str, Capabilities]:
        return self._inner.transports()

    def carriers(self) -> Mapping[str, Sequence[str]]:
        return self._inner.carriers()

    def expect(self, plan: ReceivePlan) -> None:
        self._inner.expect(plan)

    def forget(self, plan_id: int) -> None:
        self._inner.forget(plan_id)

    def add_peer(self, peer: AgentDescriptor) -> None:
        self._inner.add_peer(peer)

    def remove_peer(self, agent_name: str) -> None:
        self._inner.remove_peer(agent_name)

    def write(
        self, agent_name: str, local: Sequence[Segment], remote: Sequence[Segment], notice: bytes
    ) -> TransferHandle:
        faults = self._faults
        faults.writes += 1
        number = faults.writes
        if faults.strikes("fail_post", number):
            raise NotPostedError(f"forced: WRITE {number} cannot be posted")
        fails = faults.strikes("fail_running", number)
        silent = faults.strikes("drop_notice", number) or fails
        kept = b"" if silent else notice
        late_s = faults.seconds("late", number) + faults.wire_s(SegmentArray.of(local).byte_count)
        delay_s = faults.seconds("delay", number)
        then: Post | None = None
        if faults.strikes("corrupt", number):
            # After the data and before the notice, as if the data had come like that.
            then, kept = self._noise_writer(agent_name, remote[0], kept), b""

        def post() -> TransferHandle:
            return self._inner.write(agent_name, local, remote, kept)

        until = time.monotonic() + late_s + delay_s
        if late_s:
            return _Doctored(None, fails, until, late=post, then=then)
        return _Doctored(post(), fails, until, then=then)

    def read(
        self, agent_name: str, local: Sequence[Segment], remote: Sequence[Segment], notice: bytes
    ) -> TransferHandle:
        self._faults.reads += 1
        number = self._faults.reads
        if self._faults.strikes("fail_read", number):
            raise NotPostedError(f"forced: READ {number} cannot be posted")
        until = time.monotonic() + self._faults.seconds("delay_read", number)
        return _Doctored(self._inner.read(agent_name, local, remote, notice), not_before=until)

    def poll(self, handle: TransferHandle) -> TransferState:
        assert isinstance(handle, _Doctored)
        state = self._inner.poll(handle.real) if handle.real else TransferState.RUNNING
        if time.monotonic() < handle.not_before:
            return TransferState.RUNNING
        if handle.late is not None:
            return self._post(handle, handle.late)
        if handle.real is None:
            return TransferState.FAILED
        if state is TransferState.DONE and handle.fails:
            return TransferState.FAILED
        if state is TransferState.DONE and handle.then is not None:
            handle.result = self._inner.finish(handle.real)
            return self._post(handle, handle.then)
        return state

    def finish(self, handle: TransferHandle) -> TransferResult:
        assert isinstance(handle, _Doctored)
        assert handle.real is not None
        result = self._inner.finish(handle.real)
        return handle.result or result

    def release(self, handle: TransferHandle) -> bool:
        assert isinstance(handle, _Doctored)
        return handle.real is None or self._inner.release(handle.real)

    def notices(self) -> list[tuple[str, bytes]]:
        if self._faults.die is not None:
            raise self._faults.die
        return self._inner.notices()

    def close(self) -> None:
        self._inner.close()

    def _post(self, handle: _Doctored, post: Post) -> TransferState:
        if post is handle.late:
            handle.late = None
        else:
            handle.then = None
        handle.real = None
        try:
            handle.real = post()
        except TransferFailedError:  # the peer has gone meanwhile
            return TransferState.FAILED
        return TransferState.RUNNING

    def _noise_writer(self, agent_name: str, target: Segment, notice: bytes) -> Post:
        length = min(_CHANGED_BYTES, target.length)
        if self._noise is None:
            self._noise = HostBuffer(_CHANGED_BYTES)
            self._noise.view()[:] = bytearray(self._faults.source.randbytes(_CHANGED_BYTES))
            self._inner.register(self._noise.segment, "DRAM")
        source = self._noise.part(0, length)
        return lambda: self._inner.write(
            agent_name, [source], [Segment(target.address, length, target.device_id)], notice
        )
