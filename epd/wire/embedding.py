"""Embedding handles on the wire."""

from collections.abc import Sequence

from epd.handover.embedding_handle import EmbeddingHandle
from epd.transfer.base import AgentDescriptor
from epd.transfer.negotiation import negotiate
from epd.v1 import common_pb2
from epd.wire.transfer import agents_from_proto, segment_from_proto


def handle_from_proto(
    message: common_pb2.EmbeddingHandle, mine: Sequence[AgentDescriptor]
) -> EmbeddingHandle:
    """The handle of a wire message, with the encoder's endpoint over the transport to use;
    :meth:`EmbeddingHandle.check` judges it. ``mine``: this process's endpoints.

    Raises:
        TransportMismatchError: the encoder has none of this process's transports.
    """
    _, agent = negotiate(mine, agents_from_proto(message.agents))
    return EmbeddingHandle(
        handle_id=message.handle_id,
        agent=agent,
        digest=message.digest,
        segments=tuple(segment_from_proto(segment) for segment in message.segments),
        byte_count=message.byte_count,
        shape=tuple(message.shape),
        dtype=message.dtype,
        lease_s=message.lease_ms / 1000,
        encoder_address=message.encoder_address,
    )
