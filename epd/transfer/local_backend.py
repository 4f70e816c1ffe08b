"""Transfers inside one process, by memory copy. For single-process use and fast tests."""

import collections
import ctypes
import secrets
import threading
import time
from collections.abc import Mapping, Sequence

from epd.errors import TransferFailedError, UnknownMemoryError
from epd.transfer.base import (
    AgentDescriptor,
    Capabilities,
    Segment,
    TransferBackend,
    TransferHandle,
    TransferResult,
    TransferState,
)
from epd.transfer.pieces import check_pairs


class LocalFabric:
    """Where the local backends of one process find each other. Shared by their agents' threads."""

    def __init__(self) -> None:
        # Held during each copy: a closing peer's memory outlives every copy into it.
        self.lock = threading.Lock()
        self.members: dict[str, LocalBackend] = {}
        #: Distinguishes this fabric from those of other processes.
        self.token = secrets.token_bytes(16)


class _Copied(TransferHandle):
    def __init__(self, result: TransferResult) -> None:
        self.result = result


class LocalBackend(TransferBackend):
    """A member of a :class:`LocalFabric`; a transfer is done when posting it returns."""

    name = "local"
    capabilities = Capabilities(one_sided=True, cancellable=True, survives_peer_loss=True)

    def __init__(self, agent_name: str, instance_id: str, fabric: LocalFabric) -> None:
        self._agent_name = agent_name
        self._instance_id = instance_id
        self._fabric = fabric
        self._registered: list[Segment] = []
        self._memory_kind = "DRAM"
        self._peers: set[str] = set()
        self._inbox: collections.deque[tuple[str, bytes]] = collections.deque()
        with fabric.lock:
            fabric.members[agent_name] = self

    def register(self, segment: Segment, memory_kind: str) -> None:
        if memory_kind != "DRAM":
            raise TransferFailedError(
                f"the local backend moves host memory only, not {memory_kind}"
            )
        self._registered.append(segment)

    def descriptor(self) -> AgentDescriptor:
        return AgentDescriptor(
            self._instance_id, self._agent_name, self.name, self._fabric.token, self._memory_kind
        )

    def carriers(self) -> Mapping[str, Sequence[str]]:
        return {self.name: ("memory",)}

    def add_peer(self, peer: AgentDescriptor) -> None:
        with self._fabric.lock:
            if peer.agent_name not in self._fabric.members:
                raise TransferFailedError(f"no local agent {peer.agent_name} in this process")
        self._peers.add(peer.agent_name)

    def remove_peer(self, agent_name: str) -> None:
        self._peers.discard(agent_name)

    def write(
        self, agent_name: str, local: Sequence[Segment], remote: Sequence[Segment], notice: bytes
    ) -> TransferHandle:
        return self._copy(agent_name, local, remote, notice, into_peer=True)

    def read(
        self, agent_name: str, local: Sequence[Segment], remote: Sequence[Segment], notice: bytes
    ) -> TransferHandle:
        return self._copy(agent_name, local, remote, notice, into_peer=False)

    def poll(self, handle: TransferHandle) -> TransferState:
        return TransferState.DONE

    def finish(self, handle: TransferHandle) -> TransferResult:
        assert isinstance(handle, _Copied)
        return handle.result

    def release(self, handle: TransferHandle) -> bool:
        return True

    def notices(self) -> list[tuple[str, bytes]]:
        arrived = []
        while self._inbox:
            arrived.append(self._inbox.popleft())
        return arrived

    def close(self) -> None:
        with self._fabric.lock:
            if self._fabric.members.get(self._agent_name) is self:
                del self._fabric.members[self._agent_name]
        self._peers.clear()
        self._registered.clear()

    def _copy(
        self,
        agent_name: str,
        local: Sequence[Segment],
        remote: Sequence[Segment],
        notice: bytes,
        *,
        into_peer: bool,
    ) -> TransferHandle:
        check_pairs(local, remote)
        started = time.perf_counter_ns()
        with self._fabric.lock:
            peer = self._fabric.members.get(agent_name)
            if agent_name not in self._peers or peer is None:
                raise TransferFailedError(f"peer {agent_name} is unknown or gone")
            self._check_registered(local)
            peer._check_registered(remote)
            for here, there in zip(local, remote, strict=True):
                target, source = (there, here) if into_peer else (here, there)
                ctypes.memmove(target.address, source.address, source.length)
            if notice:
                peer._inbox.append((self._agent_name, notice))
        elapsed = time.perf_counter_ns() - started
        return _Copied(
            TransferResult(sum(one.length for one in local), len(local), elapsed, elapsed)
        )

    def _check_registered(self, segments: Sequence[Segment]) -> None:
        for segment in segments:
            end = segment.address + segment.length
            if not any(
                whole.address <= segment.address and end <= whole.address + whole.length
                for whole in self._registered
            ):
                raise UnknownMemoryError(
                    f"{segment.length} bytes at {segment.address:#x} are not registered "
                    f"with {self._agent_name}"
                )
