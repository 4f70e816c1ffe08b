"""Receive plans of leases, for transports whose receiving end takes part in a WRITE."""

import asyncio
from concurrent.futures import Future

import numpy as np

from epd.engine.kv_layout import KvLayout
from epd.handover.lease import Lease
from epd.handover.seal import SealSlots
from epd.transfer.agent import TransferAgent
from epd.transfer.base import AgentDescriptor, ReceivePlan
from epd.transfer.segments import SegmentArray


class LeasePlans:
    """Lets a writer's transport into the blocks and the seal slot of its lease, from Reserve until
    the lease is sealed or ends. Does nothing for writers that come over a one-sided transport.

    Owned by the event loop.

    Args:
        agent: Started.
        layout: This worker's KV, with its regions.
        slots: Where seals land.
    """

    def __init__(self, agent: TransferAgent, layout: KvLayout, slots: SealSlots) -> None:
        self._agent = agent
        self._layout = layout
        self._slots = slots
        self._writers: dict[str, AgentDescriptor] = {}  # by instance id
        self._plans: dict[int, Future[None]] = {}  # by generation

    def peer_arrived(self, peer: AgentDescriptor) -> None:
        """A writer is connected, over the transport of its descriptor."""
        self._writers[peer.instance_id] = peer

    def peer_gone(self, instance_id: str) -> None:
        """A writer is gone."""
        self._writers.pop(instance_id, None)

    def begin(self, lease: Lease) -> None:
        """A lease has been granted; :meth:`in_force` tells when its writer may begin."""
        writer = self._writers.get(lease.peer)
        if writer is None or not self._agent.needs_plan(writer.transport):
            return
        plan = ReceivePlan(lease.generation, writer.agent_name, self._segments(lease))
        self._plans[lease.generation] = self._agent.expect(plan)

    async def in_force(self, lease: Lease) -> None:
        """Waits until the transport knows: a WRITE that came earlier would be refused.

        Raises:
            EpdError: the transfer agent has ended.
        """
        plan = self._plans.get(lease.generation)
        if plan is not None:
            await asyncio.wrap_future(plan)

    def end(self, lease: Lease) -> None:
        """A lease is sealed or over: nothing more may land."""
        if self._plans.pop(lease.generation, None) is not None:
            self._agent.forget(lease.generation)

    def _segments(self, lease: Lease) -> SegmentArray:
        blocks = np.array(lease.writable_blocks, dtype=np.int64)
        seal = SegmentArray.of([self._slots.segment_of(lease.seal_slot)])
        rows = [seal.rows]
        for layer in range(self._layout.layer_count):
            region = self._layout.region_of(layer)
            begins = region.block_address(layer, 0) + blocks * region.block_stride
            rows.append(SegmentArray.at(begins, self._layout.block_bytes, region.device_id).rows)
        return SegmentArray(np.concatenate(rows))
