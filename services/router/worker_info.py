"""What a worker says about itself, from the wire."""

from epd.v1 import common_pb2, worker_pb2
from services.router.account import LoadReport
from services.router.workers import PairingKey, WorkerInfo


def info_from_proto(message: worker_pb2.GetInfoResponse) -> WorkerInfo:
    """The answer of ``GetInfo``."""
    return WorkerInfo(
        instance_id=message.instance_id,
        model_name=message.model_name,
        model_digest=message.model_digest,
        processor_digest=message.processor_digest,
        context_length=message.context_length,
        accepts_images=message.accepts_images,
        max_images=message.max_images,
        unified=message.unified,
        pairing=_pairing(message.kv_layout) if message.HasField("kv_layout") else None,
    )


def report_from_proto(message: worker_pb2.WatchLoadResponse) -> LoadReport:
    """One message of ``WatchLoad``."""
    return LoadReport(
        requests=message.running_requests + message.waiting_requests,
        waiting_tokens=message.waiting_tokens,
        free_blocks=message.free_blocks,
        total_blocks=message.total_blocks,
    )


def _pairing(layout: common_pb2.KvLayout) -> PairingKey:
    return PairingKey(
        protocol_version=layout.protocol_version,
        model_digest=layout.model_digest,
        layer_count=layout.layer_count,
        kv_head_count=layout.kv_head_count,
        head_dim=layout.head_dim,
        dtype=layout.dtype,
        block_size=layout.block_size,
    )
