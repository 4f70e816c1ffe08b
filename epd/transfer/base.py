"""The data plane's interface: one small class per transfer library behind it.

A backend is driven by one thread only (``TransferAgent``'s). It moves bytes between registered
memory of two processes; it knows no request, no layer and no gRPC.
"""

import abc
import enum
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Segment:
    """A run of memory: virtual address in its owner, length in bytes, device ordinal (0 host)."""

    address: int
    length: int
    device_id: int = 0


@dataclass(frozen=True)
class AgentDescriptor:
    """How to reach the transfer endpoint of one process start (mirrors the proto message)."""

    instance_id: str
    agent_name: str
    transport: str
    metadata: bytes = field(repr=False)
    memory_kind: str = "DRAM"


@dataclass(frozen=True)
class ReceivePlan:
    """Memory that one peer may WRITE to, from a reservation; ``plan_id`` is the owner's."""

    plan_id: int
    agent_name: str
    segments: Sequence[Segment]


@dataclass(frozen=True)
class Capabilities:
    """What a backend can do; callers ask here instead of comparing names.

    One-sided: a peer's memory is written and read without its help, so nothing checks whether it
    still wants to be written to. Otherwise WRITEs outside the receive plans are refused.
    """

    one_sided: bool
    cancellable: bool
    survives_peer_loss: bool


class TransferState(enum.Enum):
    """State of a posted transfer. FAILED is a result, not an exception."""

    RUNNING = "running"
    DONE = "done"
    FAILED = "failed"


@dataclass(frozen=True)
class TransferResult:
    """What a finished transfer did, from the library's own telemetry where it has one.

    ``post_ns`` and ``transfer_ns`` are durations; the latter runs from posting to completion.
    """

    byte_count: int
    descriptor_count: int
    post_ns: int
    transfer_ns: int


class TransferHandle:
    """A posted transfer; opaque to callers."""


class TransferBackend(abc.ABC):
    """One transfer library. Every method is called from the agent thread, none may block long."""

    name: str
    capabilities: Capabilities

    @abc.abstractmethod
    def register(self, segment: Segment, memory_kind: str) -> None:
        """Makes memory reachable for peers. Called before :meth:`descriptor`, once per pool."""

    @abc.abstractmethod
    def descriptor(self) -> AgentDescriptor:
        """Connection data with everything registered so far."""

    def transports(self) -> Mapping[str, Capabilities]:
        """Capabilities by transport name; several where a backend is made of several."""
        return {self.name: self.capabilities}

    def descriptors(self) -> list[AgentDescriptor]:
        """One descriptor for each transport, the preferred one first."""
        return [self.descriptor()]

    def carriers(self) -> Mapping[str, Sequence[str]]:
        """What really moves the bytes (shm, tcp, rdma, …), by transport, since the process start.

        A transport that cannot tell, or has no peer yet, is absent or has none. Any thread.
        """
        return {}

    @abc.abstractmethod
    def add_peer(self, peer: AgentDescriptor) -> None:
        """Gets ready to talk to a peer. Raises TransferFailedError. Idempotent per agent name."""

    @abc.abstractmethod
    def remove_peer(self, agent_name: str) -> None:
        """Forgets a peer. Unknown names are fine."""

    def expect(self, plan: ReceivePlan) -> None:  # noqa: B027
        """Lets a peer WRITE until :meth:`forget`. A one-sided transport cannot ask, nor refuse."""

    def forget(self, plan_id: int) -> None:  # noqa: B027
        """Ends a plan: a WRITE that has not landed by now never will. Unknown plans are fine."""

    @abc.abstractmethod
    def write(
        self, agent_name: str, local: Sequence[Segment], remote: Sequence[Segment], notice: bytes
    ) -> TransferHandle:
        """Posts a WRITE; ``notice`` reaches the peer after the data. Raises TransferFailedError."""

    @abc.abstractmethod
    def read(
        self, agent_name: str, local: Sequence[Segment], remote: Sequence[Segment], notice: bytes
    ) -> TransferHandle:
        """Posts a READ; ``notice`` reaches the peer after the data. Raises TransferFailedError."""

    @abc.abstractmethod
    def poll(self, handle: TransferHandle) -> TransferState:
        """The transfer's state, without waiting."""

    @abc.abstractmethod
    def finish(self, handle: TransferHandle) -> TransferResult:
        """Telemetry of a DONE transfer; releases the handle."""

    @abc.abstractmethod
    def release(self, handle: TransferHandle) -> bool:
        """Releases a handle in any state; False while the library still needs it (ask again)."""

    @abc.abstractmethod
    def notices(self) -> list[tuple[str, bytes]]:
        """Notices that have arrived since the last call: (agent name, message)."""

    @abc.abstractmethod
    def close(self) -> None:
        """Deregisters memory and forgets all peers."""
