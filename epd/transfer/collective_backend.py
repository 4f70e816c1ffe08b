"""Point-to-point sends of torch.distributed, a group for each pair."""

import collections
import itertools
import logging
from collections.abc import Mapping, Sequence

import torch

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
from epd.transfer.collective_initiator import CollectiveHandle, CollectiveInitiator
from epd.transfer.collective_message import read_number
from epd.transfer.collective_options import CollectiveOptions
from epd.transfer.collective_target import CollectiveTarget
from epd.transfer.pair_group import PairGroup
from epd.transfer.pieces import check_pairs
from epd.transfer.receive_plans import ReceivePlans
from epd.transfer.registered_memory import RegisteredMemory
from epd.transfer.wire import Wire
from epd.transfer.wire_address import WireAddress
from epd.transfer.wire_hub import ENDED, WireHub

log = logging.getLogger(__name__)

_HOST = torch.device("cpu")


class CollectiveBackend(TransferBackend):
    """Two-sided: both ends take part in every transfer, each on its agent thread.

    Args:
        agent_name: Name for peers.
        instance_id: This process start.
        host: Numeric address by which peers reach this process.
        options: Bounds.
    """

    name = "collective"
    capabilities = Capabilities(one_sided=False, cancellable=False, survives_peer_loss=True)

    def __init__(
        self, agent_name: str, instance_id: str, host: str, options: CollectiveOptions
    ) -> None:
        self._agent_name = agent_name
        self._instance_id = instance_id
        self._host = host
        self._options = options
        self._hub = WireHub(agent_name, host)
        self._memory = RegisteredMemory()
        self._plans = ReceivePlans()
        # Replaced and never changed: read by any thread.
        self._libraries: frozenset[str] = frozenset()
        self._peers: dict[str, AgentDescriptor] = {}
        self._initiators: dict[str, CollectiveInitiator] = {}
        self._targets: dict[Wire, CollectiveTarget] = {}
        self._arrived: collections.deque[tuple[str, bytes]] = collections.deque()
        self._numbers = itertools.count(1)

    def register(self, segment: Segment, memory_kind: str) -> None:
        self._memory.add(segment, memory_kind)

    def descriptor(self) -> AgentDescriptor:
        return AgentDescriptor(
            self._instance_id,
            self._agent_name,
            self.name,
            self._hub.address.encode(),
            self._memory.main_kind,
        )

    def carriers(self) -> Mapping[str, Sequence[str]]:
        return {self.name: tuple(sorted(self._libraries))}

    def add_peer(self, peer: AgentDescriptor) -> None:
        known = self._initiators.get(peer.agent_name)
        alive = known is not None and known.failure is None
        if alive and self._peers.get(peer.agent_name) == peer:
            return
        self.remove_peer(peer.agent_name)
        wire = self._hub.dial(peer.agent_name, WireAddress.decode(peer.metadata))
        on_device = "VRAM" == peer.memory_kind == self._memory.main_kind
        self._initiators[peer.agent_name] = CollectiveInitiator(
            wire,
            self._memory,
            lambda: self._make_group(peer.agent_name, None, on_device),
            self._host,
        )
        self._peers[peer.agent_name] = peer

    def remove_peer(self, agent_name: str) -> None:
        self._hub.drop(agent_name)
        self._pump()  # the ends of those connections
        self._initiators.pop(agent_name, None)
        self._peers.pop(agent_name, None)

    def expect(self, plan: ReceivePlan) -> None:
        self._plans.add(plan)

    def forget(self, plan_id: int) -> None:
        self._plans.remove(plan_id)

    def write(
        self, agent_name: str, local: Sequence[Segment], remote: Sequence[Segment], notice: bytes
    ) -> TransferHandle:
        return self._begin(agent_name, local, remote, notice, is_write=True)

    def read(
        self, agent_name: str, local: Sequence[Segment], remote: Sequence[Segment], notice: bytes
    ) -> TransferHandle:
        return self._begin(agent_name, local, remote, notice, is_write=False)

    def poll(self, handle: TransferHandle) -> TransferState:
        assert isinstance(handle, CollectiveHandle)
        return handle.state

    def finish(self, handle: TransferHandle) -> TransferResult:
        assert isinstance(handle, CollectiveHandle)
        return handle.result

    def release(self, handle: TransferHandle) -> bool:
        assert isinstance(handle, CollectiveHandle)
        return handle.released

    def notices(self) -> list[tuple[str, bytes]]:
        self._pump()
        arrived = list(self._arrived)
        self._arrived.clear()
        return arrived

    def close(self) -> None:
        for name in list(self._peers):
            self.remove_peer(name)
        for target in self._targets.values():
            target.close()
        self._targets.clear()
        self._hub.close()

    def _begin(
        self,
        agent_name: str,
        local: Sequence[Segment],
        remote: Sequence[Segment],
        notice: bytes,
        *,
        is_write: bool,
    ) -> TransferHandle:
        check_pairs(local, remote)
        initiator = self._initiators.get(agent_name)
        if initiator is None:
            raise TransferFailedError(f"peer {agent_name} is unknown")
        self._memory.check(local)
        handle = CollectiveHandle(next(self._numbers), local, is_write=is_write)
        initiator.begin(handle, remote, notice)
        return handle

    def _pump(self) -> None:
        """Takes frames in and moves every pair on; a pair that breaks takes no other along."""
        for wire, peer, kind, body in self._hub.poll():
            initiator = self._initiators.get(peer)
            try:
                if initiator is not None and initiator.wire is wire:
                    if kind == ENDED:
                        initiator.fail(f"connection with {peer} has ended: {body.decode()}")
                    else:
                        initiator.answered(kind, *read_number(body))
                elif kind == ENDED:
                    target = self._targets.pop(wire, None)
                    if target is not None:
                        target.close()
                else:
                    self._target(wire, peer).take(kind, body)
            except TransferFailedError as error:
                wire.close(error.message)
        for initiator in self._initiators.values():
            _advance(initiator, initiator.wire)
        for wire, target in self._targets.items():
            _advance(target, wire)

    def _target(self, wire: Wire, peer: str) -> CollectiveTarget:
        if wire not in self._targets:
            self._targets[wire] = CollectiveTarget(
                peer,
                wire,
                self._memory,
                self._plans,
                lambda invitation: self._make_group(
                    peer, (invitation.host, invitation.port), invitation.on_device
                ),
                lambda name, notice: self._arrived.append((name, notice)),
            )
        return self._targets[wire]

    def _make_group(self, peer: str, store: tuple[str, int] | None, on_device: bool) -> PairGroup:
        """``store``: the peer's, None makes one. Raises TransferFailedError."""
        if on_device and self._memory.main_kind != "VRAM":
            raise TransferFailedError(f"{peer} wants device memory moved, there is none here")
        device = torch.device("cuda", torch.cuda.current_device()) if on_device else _HOST
        self._libraries |= {"nccl" if on_device else "gloo"}
        return PairGroup(peer, self._host, store, device, self._options.timeout_s)


def _advance(end: CollectiveInitiator | CollectiveTarget, wire: Wire) -> None:
    """The connection is ended with a pair that breaks, and the ENDED that follows ends the pair."""
    try:
        end.advance()
    except TransferFailedError as error:
        log.warning("collective pair given up: %s", error.message)
        wire.close(error.message)
