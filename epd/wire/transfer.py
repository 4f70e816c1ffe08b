"""Segments and transfer endpoints on the wire."""

from collections.abc import Iterable, Mapping, Sequence

from epd.transfer.base import AgentDescriptor, Segment
from epd.v1 import common_pb2, worker_pb2


def segment_to_proto(segment: Segment) -> common_pb2.Segment:
    """The wire form of a segment."""
    return common_pb2.Segment(
        address=segment.address, length=segment.length, device_id=segment.device_id
    )


def segment_from_proto(message: common_pb2.Segment) -> Segment:
    """The segment of a wire message."""
    return Segment(message.address, message.length, message.device_id)


def agent_to_proto(agent: AgentDescriptor) -> common_pb2.AgentDescriptor:
    """The wire form of a transfer endpoint."""
    return common_pb2.AgentDescriptor(
        instance_id=agent.instance_id,
        agent_name=agent.agent_name,
        transport=agent.transport,
        metadata=agent.metadata,
        memory_kind=agent.memory_kind,
    )


def agent_from_proto(message: common_pb2.AgentDescriptor) -> AgentDescriptor:
    """The transfer endpoint of a wire message."""
    return AgentDescriptor(
        instance_id=message.instance_id,
        agent_name=message.agent_name,
        transport=message.transport,
        metadata=message.metadata,
        memory_kind=message.memory_kind,
    )


def agents_to_proto(agents: Iterable[AgentDescriptor]) -> list[common_pb2.AgentDescriptor]:
    """The wire form of a process's endpoints, the preferred transport first."""
    return [agent_to_proto(agent) for agent in agents]


def agents_from_proto(
    messages: Iterable[common_pb2.AgentDescriptor],
) -> list[AgentDescriptor]:
    """The endpoints of a process."""
    return [agent_from_proto(message) for message in messages]


def carriers_to_proto(
    carriers: Mapping[str, Sequence[str]],
) -> list[worker_pb2.TransportCarriers]:
    """The wire form of what moves the bytes, by transport."""
    return [
        worker_pb2.TransportCarriers(transport=transport, carriers=names)
        for transport, names in carriers.items()
    ]
