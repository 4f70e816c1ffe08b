"""What the encoder tells about itself: identity, load, metrics."""

from collections.abc import Callable, Mapping, Sequence

from epd.encoding.encoder_stats import EncoderStats
from epd.telemetry import semconv as names
from epd.telemetry.setup import metadata_version
from epd.transfer.base import AgentDescriptor
from epd.v1 import worker_pb2
from epd.wire.transfer import agents_to_proto, carriers_to_proto
from services.encoder.config import EncoderConfig
from services.encoder.vision_parts import VisionParts


def encoder_info(
    config: EncoderConfig,
    parts: VisionParts,
    agents: Sequence[AgentDescriptor],
    carriers: Mapping[str, Sequence[str]],
    metrics_address: str,
) -> worker_pb2.GetInfoResponse:
    """The answer of GetInfo."""
    return worker_pb2.GetInfoResponse(
        role=worker_pb2.WORKER_ROLE_ENCODER,
        instance_id=agents[0].instance_id,
        version=metadata_version(),
        model_name=config.served_name,
        model_digest=parts.model_digest,
        processor_digest=config.encoding.processor_digest(parts.family),
        context_length=parts.family.context_length,
        agents=agents_to_proto(agents),
        carriers=carriers_to_proto(carriers),
        metrics_address=metrics_address,
        accepts_images=True,
        max_images=config.encoding.max_images,
    )


def encoder_load(
    stats: EncoderStats, instance_id: str, *, draining: bool
) -> worker_pb2.WatchLoadResponse:
    """One load report; "requests" are images and "tokens" patches here."""
    return worker_pb2.WatchLoadResponse(
        instance_id=instance_id,
        running_requests=stats.running_images,
        waiting_requests=stats.waiting_images,
        waiting_tokens=stats.waiting_patches,
        total_embedding_bytes=stats.total_bytes,
        free_embedding_bytes=stats.free_bytes,
        quarantined_embedding_bytes=stats.quarantined_bytes,
        draining=draining,
        open_transfers=stats.open_leases,
    )


def encoder_readings(
    stats: Callable[[], EncoderStats], parameter_count: int
) -> dict[str, Callable[[], float]]:
    """Gauges and totals by metric name."""
    return {
        names.MODEL_PARAMETERS: lambda: parameter_count,
        names.REQUEST_RUNNING: lambda: stats().running_images,
        names.REQUEST_WAITING: lambda: stats().waiting_images,
        names.EMBEDDING_BYTES_USED: lambda: stats().used_bytes,
        names.EMBEDDING_BYTES_FREE: lambda: stats().free_bytes,
        names.EMBEDDING_BYTES_QUARANTINED: lambda: stats().quarantined_bytes,
        names.EMBEDDING_BYTES_LIMIT: lambda: stats().total_bytes,
        names.EMBEDDING_CACHE_HITS: lambda: stats().cache_hits,
        names.EMBEDDING_CACHE_QUERIES: lambda: stats().cache_queries,
        names.EMBEDDING_DISK_BYTES_USED: lambda: stats().disk_bytes,
        names.EMBEDDING_DISK_HITS: lambda: stats().disk.hits,
        names.EMBEDDING_DISK_QUERIES: lambda: stats().disk.queries,
        names.EMBEDDING_DISK_WRITES: lambda: stats().disk.writes,
        names.EMBEDDING_DISK_DROPPED: lambda: stats().disk.dropped,
        names.EMBEDDING_DISK_DAMAGED: lambda: stats().disk.damaged,
        names.EMBEDDING_CACHE_EVICTIONS: lambda: stats().evictions,
        names.ENCODER_FORWARD: lambda: stats().encoded_images,
        names.ENCODER_BATCH: lambda: stats().forwards,
        names.ENCODER_PATCH: lambda: stats().encoded_patches,
        names.PREPROCESS_RESTART: lambda: stats().preprocess_restarts,
        names.TRANSFER_OPEN: lambda: stats().open_leases,
        names.LEASE_EXPIRED: lambda: stats().expired_leases,
        names.LEASE_UNKNOWN_RENEWAL: lambda: stats().unknown_renewals,
    }
