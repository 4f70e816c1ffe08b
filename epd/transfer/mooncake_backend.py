"""Mooncake's transfer engine. The only file that knows the library."""

import collections
import functools
import importlib
import logging
import struct
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from epd.errors import TransferFailedError, UnavailableError
from epd.transfer.base import (
    AgentDescriptor,
    Capabilities,
    Segment,
    TransferBackend,
    TransferHandle,
    TransferResult,
    TransferState,
)
from epd.transfer.lane import Lane, LaneCall
from epd.transfer.pieces import check_pairs
from epd.transfer.registered_memory import RegisteredMemory
from epd.transfer.segments import SegmentArray
from epd.transfer.wire import Wire
from epd.transfer.wire_address import WireAddress
from epd.transfer.wire_hub import ENDED, WireHub

log = logging.getLogger(__name__)

_NOTICE = 1
_PORT = struct.Struct("<H")


@dataclass(frozen=True)
class MooncakeOptions:
    """How the engine is set up: ``protocol`` is tcp or rdma, ``device`` the RDMA devices to use,
    separated by commas; none lets the engine choose.
    """

    protocol: str = "tcp"
    device: str = ""


@dataclass
class _Peer:
    """``engine``: host:port by which the engine knows it."""

    descriptor: AgentDescriptor
    engine: str
    wire: Wire
    lane: Lane


class _MooncakeHandle(TransferHandle):
    def __init__(self, peer: _Peer, byte_count: int, pairs: int, notice: bytes) -> None:
        self.peer = peer
        self.notice = notice
        self.state = TransferState.RUNNING
        self.call: LaneCall | None = None
        self.planned = (byte_count, pairs)
        self.posted_ns = time.perf_counter_ns()


class MooncakeBackend(TransferBackend):
    """One transfer engine, and a connection per peer for the notices it lacks.

    The engine reports a WRITE as done once its peer's engine has confirmed it (over TCP by a frame
    of its own, over RDMA by the acknowledgement of the last write). Only then is the notice sent,
    so it cannot overtake its data. The engine's calls block, hence a lane per peer.

    Args:
        agent_name: Name for peers.
        instance_id: This process start.
        host: Numeric address by which peers reach this process.
        options: Protocol.
    """

    name = "mooncake"
    capabilities = Capabilities(one_sided=True, cancellable=False, survives_peer_loss=True)

    def __init__(
        self, agent_name: str, instance_id: str, host: str, options: MooncakeOptions
    ) -> None:
        self._engine = _open_engine(host, options)
        self._protocol = options.protocol
        self._agent_name = agent_name
        self._instance_id = instance_id
        self._hub = WireHub(agent_name, host)
        self._memory = RegisteredMemory()
        self._registered: list[Segment] = []
        self._peers: dict[str, _Peer] = {}
        self._arrived: collections.deque[tuple[str, bytes]] = collections.deque()

    def register(self, segment: Segment, memory_kind: str) -> None:
        answer = self._engine.register_memory(segment.address, segment.length)
        if answer != 0:
            raise TransferFailedError(f"Mooncake cannot register {segment}: {answer}")
        self._memory.add(segment, memory_kind)
        self._registered.append(segment)

    def descriptor(self) -> AgentDescriptor:
        return AgentDescriptor(
            self._instance_id,
            self._agent_name,
            self.name,
            _PORT.pack(self._engine.get_rpc_port()) + self._hub.address.encode(),
            self._memory.main_kind,
        )

    def carriers(self) -> Mapping[str, Sequence[str]]:
        return {self.name: (self._protocol,)}  # the engine falls back to no other

    def add_peer(self, peer: AgentDescriptor) -> None:
        known = self._peers.get(peer.agent_name)
        if known is not None and known.descriptor == peer and known.wire.closed is None:
            return
        self.remove_peer(peer.agent_name)
        if len(peer.metadata) <= _PORT.size:
            raise TransferFailedError(f"metadata of {peer.agent_name} is too short")
        (port,) = _PORT.unpack_from(peer.metadata)
        address = WireAddress.decode(peer.metadata[_PORT.size :])
        self._peers[peer.agent_name] = _Peer(
            peer,
            f"{address.host}:{port}",
            self._hub.dial(peer.agent_name, address),
            Lane(f"mooncake {peer.agent_name}"),
        )

    def remove_peer(self, agent_name: str) -> None:
        self._hub.drop(agent_name)
        peer = self._peers.pop(agent_name, None)
        if peer is not None:
            # Each that has still to begin would try to reach the peer until its own time is up.
            peer.lane.give_up("this side has forgotten the peer")

    def write(
        self, agent_name: str, local: Sequence[Segment], remote: Sequence[Segment], notice: bytes
    ) -> TransferHandle:
        call = self._engine.batch_transfer_sync_write
        return self._post(call, agent_name, local, remote, notice)

    def read(
        self, agent_name: str, local: Sequence[Segment], remote: Sequence[Segment], notice: bytes
    ) -> TransferHandle:
        call = self._engine.batch_transfer_sync_read
        return self._post(call, agent_name, local, remote, notice)

    def poll(self, handle: TransferHandle) -> TransferState:
        assert isinstance(handle, _MooncakeHandle)
        assert handle.call is not None
        if handle.state is TransferState.RUNNING and handle.call.done:
            handle.state = self._end(handle, handle.call.error)
        return handle.state

    def finish(self, handle: TransferHandle) -> TransferResult:
        assert isinstance(handle, _MooncakeHandle)
        elapsed = time.perf_counter_ns() - handle.posted_ns
        return TransferResult(*handle.planned, elapsed, elapsed)

    def release(self, handle: TransferHandle) -> bool:
        assert isinstance(handle, _MooncakeHandle)
        return handle.call is None or handle.call.done

    def notices(self) -> list[tuple[str, bytes]]:
        for wire, peer, kind, body in self._hub.poll():
            if kind == _NOTICE:
                self._arrived.append((peer, body))
            elif kind != ENDED:
                wire.close(f"a frame of kind {kind} is not expected")
        arrived = list(self._arrived)
        self._arrived.clear()
        return arrived

    def close(self) -> None:
        for name in list(self._peers):
            self.remove_peer(name)
        self._hub.close()
        for segment in self._registered:
            if self._engine.unregister_memory(segment.address) != 0:
                log.warning("Mooncake cannot unregister %s", segment)
        self._registered.clear()

    def _post(
        self,
        call: Callable[..., int],
        agent_name: str,
        local: Sequence[Segment],
        remote: Sequence[Segment],
        notice: bytes,
    ) -> TransferHandle:
        check_pairs(local, remote)
        self._memory.check(local)  # the engine does not, over TCP
        peer = self._peers.get(agent_name)
        if peer is None:
            raise TransferFailedError(f"peer {agent_name} is unknown")
        if peer.wire.closed is not None:
            raise TransferFailedError(f"peer {agent_name} is gone: {peer.wire.closed}")
        here, there = SegmentArray.of(local), SegmentArray.of(remote)
        handle = _MooncakeHandle(peer, here.byte_count, len(here), notice)
        columns = (here.rows[:, 0], there.rows[:, 0], here.rows[:, 1])
        arguments = (peer.engine, *(column.tolist() for column in columns))
        handle.call = peer.lane.call(functools.partial(_checked, call, arguments))
        return handle

    def _end(self, handle: _MooncakeHandle, error: str | None) -> TransferState:
        try:
            if error is not None:
                raise TransferFailedError(error)
            if handle.notice:
                handle.peer.wire.send(_NOTICE, handle.notice)
        except TransferFailedError as failure:
            log.warning("Mooncake transfer failed: %s", failure.message)
            return TransferState.FAILED
        return TransferState.DONE


def _checked(call: Callable[..., int], arguments: tuple[Any, ...]) -> None:
    """The engine answers numbers, not exceptions."""
    answer = call(*arguments)
    if answer != 0:
        raise TransferFailedError(f"the engine answers {answer}")


def _open_engine(host: str, options: MooncakeOptions) -> Any:
    try:
        engine = importlib.import_module("mooncake.engine").TransferEngine()
    except ImportError as error:
        raise UnavailableError(
            "transport mooncake needs a mooncake-transfer-engine package and its system libraries: "
            f"{error}"
        ) from error
    answer = engine.initialize(host, "P2PHANDSHAKE", options.protocol, options.device)
    if answer != 0:
        raise UnavailableError(f"Mooncake cannot start with {options}: {answer}")
    return engine
