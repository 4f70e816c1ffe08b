"""The end of a collective pair that begins transfers."""

import collections
import logging
import time
from collections.abc import Callable, Sequence

import torch

from epd.errors import TransferFailedError
from epd.transfer.base import Segment, TransferHandle, TransferResult, TransferState
from epd.transfer.collective_message import GroupInvitation, Kind, Move, number_body
from epd.transfer.lane import LaneCall
from epd.transfer.pair_group import PairGroup
from epd.transfer.registered_memory import RegisteredMemory
from epd.transfer.segments import SegmentArray
from epd.transfer.staging import gather, new_staging, scatter
from epd.transfer.wire import Wire

log = logging.getLogger(__name__)


class CollectiveHandle(TransferHandle):
    """A transfer from its announcement to the peer's word that it has landed."""

    def __init__(self, number: int, local: Sequence[Segment], *, is_write: bool) -> None:
        self.number = number
        self.local = local
        self.is_write = is_write
        self.state = TransferState.RUNNING
        self.staging: torch.Tensor | None = None
        self.call: LaneCall | None = None
        self._posted_ns = time.perf_counter_ns()
        self._ended_ns = 0

    @property
    def released(self) -> bool:
        """Nothing touches its memory any more: only the staging was ever lent to the library."""
        return self.call is None or self.call.done

    @property
    def result(self) -> TransferResult:
        """Telemetry of a finished transfer; posting is not told apart from moving."""
        byte_count = SegmentArray.of(self.local).byte_count
        elapsed = self._ended_ns - self._posted_ns
        return TransferResult(byte_count, len(self.local), elapsed, elapsed)

    def end(self, state: TransferState) -> None:
        """The first end counts."""
        if self.state is TransferState.RUNNING:
            self.state = state
            self._ended_ns = time.perf_counter_ns()
            self.staging = None


class CollectiveInitiator:
    """Transfers with one peer over the connection that this agent has made. Agent thread only.

    The group is made with the first transfer. Nothing is sent before the peer has posted its half,
    so a WRITE that the peer refuses costs a message and no data.

    Args:
        wire: The connection.
        memory: This agent's.
        make_group: Makes the group, as its host.
    """

    def __init__(
        self, wire: Wire, memory: RegisteredMemory, make_group: Callable[[], PairGroup], host: str
    ) -> None:
        self.wire = wire
        #: Why there can be no more transfers; None while there can.
        self.failure: str | None = None
        self._memory = memory
        self._make_group = make_group
        self._host = host
        self._group: PairGroup | None = None
        self._open: dict[int, CollectiveHandle] = {}
        self._accepted: collections.deque[CollectiveHandle] = collections.deque()

    def begin(self, handle: CollectiveHandle, remote: Sequence[Segment], notice: bytes) -> None:
        """Asks the peer for its half. Raises TransferFailedError: there is no way to the peer."""
        if self.failure is not None:
            raise TransferFailedError(self.failure)
        if self._group is None:
            self._group = self._make_group()
            on_device = self._group.device.type == "cuda"
            invitation = GroupInvitation(self._host, self._group.port, on_device)
            self.wire.send(Kind.GROUP, invitation.encode())
        kind = Kind.OFFER if handle.is_write else Kind.ASK
        self.wire.send(kind, Move(handle.number, remote, notice).encode())
        self._open[handle.number] = handle

    def answered(self, kind: int, number: int, text: str) -> None:
        """The peer's answer to a transfer. Raises TransferFailedError: it makes no sense."""
        handle = self._open.get(number)
        if handle is None:
            return  # it was given up here meanwhile
        if kind == Kind.ACCEPT:
            self._accepted.append(handle)
        elif kind == Kind.LANDED and handle.is_write:
            self._end(handle, TransferState.DONE)
        elif kind == Kind.REFUSED:
            log.warning("transfer refused by the peer: %s", text)
            self._end(handle, TransferState.FAILED)
        else:
            raise TransferFailedError(f"an answer of kind {kind} to transfer {number}")

    def advance(self) -> None:
        """Does what can be done without waiting. Raises TransferFailedError: the pair is broken."""
        if self._group is None:
            return
        if self._group.failure is not None:
            raise TransferFailedError(f"no group with the peer: {self._group.failure}")
        while self._accepted and self._group.ready:
            self._post(self._accepted.popleft(), self._group)
        for handle in list(self._open.values()):
            if handle.call is None or not handle.call.done:
                continue
            if handle.call.error is not None:
                raise TransferFailedError(handle.call.error)
            if not handle.is_write:
                assert handle.staging is not None
                scatter(handle.staging, handle.local, self._memory)
                self._end(handle, TransferState.DONE)
                self.wire.send(Kind.FETCHED, number_body(handle.number))

    def fail(self, reason: str) -> None:
        """Ends everything with this peer."""
        self.failure = self.failure or reason
        for handle in list(self._open.values()):
            self._end(handle, TransferState.FAILED)
        self._accepted.clear()
        if self._group is not None:
            self._group.close()
            self._group = None

    def _post(self, handle: CollectiveHandle, group: PairGroup) -> None:
        if handle.is_write:
            handle.staging = gather(handle.local, self._memory, group.device)
            handle.call = group.send(handle.staging, handle.number)
        else:
            handle.staging = new_staging(handle.local, group.device)
            handle.call = group.receive(handle.staging, handle.number)

    def _end(self, handle: CollectiveHandle, state: TransferState) -> None:
        handle.end(state)
        self._open.pop(handle.number, None)
