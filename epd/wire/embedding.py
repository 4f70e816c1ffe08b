"""Embedding handles on the wire."""

from epd.handover.embedding_handle import EmbeddingHandle
from epd.v1 import common_pb2
from epd.wire.transfer import agent_from_proto, segment_from_proto


def handle_from_proto(message: common_pb2.EmbeddingHandle) -> EmbeddingHandle:
    """The handle of a wire message; :meth:`EmbeddingHandle.check` judges it."""
    return EmbeddingHandle(
        handle_id=message.handle_id,
        agent=agent_from_proto(message.agent),
        digest=message.digest,
        segments=tuple(segment_from_proto(segment) for segment in message.segments),
        byte_count=message.byte_count,
        shape=tuple(message.shape),
        dtype=message.dtype,
        lease_s=message.lease_ms / 1000,
        encoder_address=message.encoder_address,
    )
