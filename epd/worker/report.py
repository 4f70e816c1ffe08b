"""What a language worker tells about itself: identity, load, prefix cache, gauges."""

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence

from epd.engine.block_pool import BlockPool
from epd.engine.engine import Engine
from epd.engine.kv_events import KvEvent
from epd.engine.requests import EngineStats
from epd.telemetry import semconv as names
from epd.telemetry.setup import metadata_version
from epd.transfer.base import AgentDescriptor
from epd.v1 import worker_pb2
from epd.wire.kv_layout import layout_to_proto
from epd.wire.transfer import agents_to_proto, carriers_to_proto

#: Look at the prefix cache this often for followers; nobody waits for these events.
KV_EVENTS_PERIOD_S = 0.1
#: Most hashes in one message; a longer change comes in parts.
KV_EVENT_HASHES = 16_384


def language_info(
    engine: Engine,
    agents: Sequence[AgentDescriptor],
    carriers: Mapping[str, Sequence[str]],
    model_name: str,
) -> worker_pb2.GetInfoResponse:
    """The part of GetInfo that both language roles share."""
    return worker_pb2.GetInfoResponse(
        instance_id=agents[0].instance_id,
        version=metadata_version(),
        model_name=model_name,
        model_digest=engine.kv_cache.layout.model_digest,
        context_length=engine.max_context,
        kv_layout=layout_to_proto(engine.kv_cache.layout),
        agents=agents_to_proto(agents),
        carriers=carriers_to_proto(carriers),
        accepts_images=engine.family.accepts_images,
    )


def block_load(stats: EngineStats) -> worker_pb2.WatchLoadResponse:
    """The engine's part of a load report."""
    return worker_pb2.WatchLoadResponse(
        running_requests=stats.running_requests,
        waiting_requests=stats.waiting_requests,
        waiting_tokens=stats.waiting_tokens,
        total_blocks=stats.total_blocks,
        free_blocks=stats.free_blocks,
        quarantined_blocks=stats.quarantined_blocks,
    )


def engine_readings(
    stats: Callable[[], EngineStats], parameter_count: int
) -> dict[str, Callable[[], float]]:
    """Gauges and totals that both language roles share, by metric name."""

    def used() -> int:
        now = stats()
        return now.total_blocks - now.free_blocks - now.quarantined_blocks

    return {
        names.MODEL_PARAMETERS: lambda: parameter_count,
        names.REQUEST_RUNNING: lambda: stats().running_requests,
        names.KV_BLOCK_USED: used,
        names.KV_BLOCK_FREE: lambda: stats().free_blocks,
        names.KV_BLOCK_QUARANTINED: lambda: stats().quarantined_blocks,
        names.KV_BLOCK_LIMIT: lambda: stats().total_blocks,
        names.PREFIX_CACHE_HITS: lambda: stats().prefix_cache_hits,
        names.PREFIX_CACHE_QUERIES: lambda: stats().prefix_cache_queries,
        names.PREEMPTION: lambda: stats().preemptions,
    }


async def follow_kv_events(
    pool: BlockPool, instance_id: str
) -> AsyncIterator[worker_pb2.WatchKvEventsResponse]:
    """Changes of the prefix cache from a full list on; ends only with the call."""
    subscription = pool.events.subscribe()
    while True:
        for event in subscription.poll():
            for message in kv_event_to_proto(event, instance_id):
                yield message
        await asyncio.sleep(KV_EVENTS_PERIOD_S)


def kv_event_to_proto(
    event: KvEvent, instance_id: str, most: int = KV_EVENT_HASHES
) -> Iterator[worker_pb2.WatchKvEventsResponse]:
    """One change as one message, or as several that share its sequence number."""
    for start in range(0, max(len(event.stored), len(event.removed), 1), most):
        yield worker_pb2.WatchKvEventsResponse(
            instance_id=instance_id,
            sequence=event.sequence,
            stored_hashes=event.stored[start : start + most],
            removed_hashes=event.removed[start : start + most],
            cleared=event.cleared and start == 0,
        )
