"""Several transfer libraries behind one agent."""

from collections.abc import Mapping, Sequence

from epd.errors import TransferFailedError
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


class _Routed(TransferHandle):
    def __init__(self, backend: TransferBackend, inner: TransferHandle) -> None:
        self.backend = backend
        self.inner = inner


class Transports(TransferBackend):
    """Each peer is reached over the one transport that its descriptor names.

    All are polled by the one agent thread, so order, bounds and failures of transfers are the same
    whatever a peer uses.

    Args:
        backends: Opened, the preferred one first.
    """

    def __init__(self, backends: Sequence[TransferBackend]) -> None:
        assert backends
        self.name = ",".join(one.name for one in backends)
        self.capabilities = backends[0].capabilities
        self._backends = {one.name: one for one in backends}
        self._peers: dict[str, TransferBackend] = {}

    def register(self, segment: Segment, memory_kind: str) -> None:
        for backend in self._backends.values():
            backend.register(segment, memory_kind)

    def descriptor(self) -> AgentDescriptor:
        return self.descriptors()[0]

    def transports(self) -> Mapping[str, Capabilities]:
        return {name: backend.capabilities for name, backend in self._backends.items()}

    def descriptors(self) -> list[AgentDescriptor]:
        return [backend.descriptor() for backend in self._backends.values()]

    def carriers(self) -> Mapping[str, Sequence[str]]:
        found: dict[str, Sequence[str]] = {}
        for backend in self._backends.values():
            found.update(backend.carriers())
        return found

    def add_peer(self, peer: AgentDescriptor) -> None:
        backend = self._backends.get(peer.transport)
        if backend is None:
            raise TransferFailedError(
                f"{peer.agent_name} is offered over {peer.transport}, this process has {self.name}"
            )
        if self._peers.get(peer.agent_name) not in (None, backend):
            self.remove_peer(peer.agent_name)
        backend.add_peer(peer)
        self._peers[peer.agent_name] = backend

    def remove_peer(self, agent_name: str) -> None:
        self._peers.pop(agent_name, None)
        for backend in self._backends.values():  # it may have connected by itself, over another
            backend.remove_peer(agent_name)

    def expect(self, plan: ReceivePlan) -> None:
        for backend in self._backends.values():
            backend.expect(plan)

    def forget(self, plan_id: int) -> None:
        for backend in self._backends.values():
            backend.forget(plan_id)

    def write(
        self, agent_name: str, local: Sequence[Segment], remote: Sequence[Segment], notice: bytes
    ) -> TransferHandle:
        backend = self._of(agent_name)
        return _Routed(backend, backend.write(agent_name, local, remote, notice))

    def read(
        self, agent_name: str, local: Sequence[Segment], remote: Sequence[Segment], notice: bytes
    ) -> TransferHandle:
        backend = self._of(agent_name)
        return _Routed(backend, backend.read(agent_name, local, remote, notice))

    def poll(self, handle: TransferHandle) -> TransferState:
        assert isinstance(handle, _Routed)
        return handle.backend.poll(handle.inner)

    def finish(self, handle: TransferHandle) -> TransferResult:
        assert isinstance(handle, _Routed)
        return handle.backend.finish(handle.inner)

    def release(self, handle: TransferHandle) -> bool:
        assert isinstance(handle, _Routed)
        return handle.backend.release(handle.inner)

    def notices(self) -> list[tuple[str, bytes]]:
        return [one for backend in self._backends.values() for one in backend.notices()]

    def close(self) -> None:
        self._peers.clear()
        for backend in self._backends.values():
            backend.close()

    def _of(self, agent_name: str) -> TransferBackend:
        if agent_name not in self._peers:
            raise TransferFailedError(f"peer {agent_name} is unknown")
        return self._peers[agent_name]
