"""Kind, unit, meaning and buckets of every metric, and how instruments are made of them."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from opentelemetry.metrics import CallbackOptions, Counter, Histogram, Meter, Observation

from epd.telemetry import semconv as names

DURATION_BUCKETS_S = (0.0001, 0.0003, 0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1, 3, 10, 30)


@dataclass(frozen=True)
class MetricSpec:
    """One metric. ``gauge`` and ``total`` are read by a callback, the others are written."""

    kind: Literal["gauge", "total", "counter", "histogram"]
    unit: str
    description: str
    buckets: Sequence[float] = ()


METRICS: Mapping[str, MetricSpec] = {
    names.RPC_SERVER_CALL_DURATION: MetricSpec(
        "histogram", "s", "Duration of incoming calls", names.RPC_DURATION_BUCKETS_S
    ),
    names.RPC_CLIENT_CALL_DURATION: MetricSpec(
        "histogram", "s", "Duration of outgoing calls", names.RPC_DURATION_BUCKETS_S
    ),
    names.HTTP_SERVER_REQUEST_DURATION: MetricSpec(
        "histogram", "s", "Duration of HTTP requests", names.RPC_DURATION_BUCKETS_S
    ),
    names.GEN_AI_SERVER_REQUEST_DURATION: MetricSpec(
        "histogram", "s", "Request duration", names.REQUEST_DURATION_BUCKETS_S
    ),
    names.GEN_AI_SERVER_TIME_TO_FIRST_TOKEN: MetricSpec(
        "histogram", "s", "Time to the first token", names.TIME_TO_FIRST_TOKEN_BUCKETS_S
    ),
    names.GEN_AI_SERVER_TIME_PER_OUTPUT_TOKEN: MetricSpec(
        "histogram", "s", "Time per token after the first", names.TIME_PER_OUTPUT_TOKEN_BUCKETS_S
    ),
    # The unit stays empty where the name already has it: the exporter would append it again.
    names.DISAGG_PREFILL_TO_DECODE_LATENCY_MS: MetricSpec(
        "histogram", "", "From the first token to the start of decode", names.LATENCY_BUCKETS_MS
    ),
    names.DISAGG_KV_TRANSFER_THROUGHPUT_GB_S: MetricSpec(
        "histogram", "", "Bytes over time of finished KV pushes", names.THROUGHPUT_BUCKETS_GB_S
    ),
    names.DISAGG_PREFILL_QUEUE_SIZE: MetricSpec("gauge", "", "Requests waiting for prefill"),
    names.DISAGG_DECODE_QUEUE_SIZE: MetricSpec("gauge", "", "Requests waiting for decode"),
    names.REQUEST_RUNNING: MetricSpec("gauge", "{request}", "Requests in the running set"),
    names.REQUEST_WAITING: MetricSpec("gauge", "{request}", "Requests that wait"),
    names.REQUEST_QUEUE_DURATION: MetricSpec(
        "histogram", "s", "Wait before entering the running set", DURATION_BUCKETS_S
    ),
    names.KV_BLOCK_USED: MetricSpec("gauge", "{block}", "KV blocks held by requests"),
    names.KV_BLOCK_FREE: MetricSpec("gauge", "{block}", "KV blocks free, evictable ones included"),
    names.KV_BLOCK_QUARANTINED: MetricSpec("gauge", "{block}", "KV blocks awaiting a peer's word"),
    names.KV_BLOCK_LIMIT: MetricSpec("gauge", "{block}", "KV blocks in all"),
    names.EMBEDDING_BYTES_USED: MetricSpec("gauge", "By", "Embedding memory pinned or cached"),
    names.EMBEDDING_BYTES_FREE: MetricSpec("gauge", "By", "Embedding memory free or evictable"),
    names.EMBEDDING_BYTES_QUARANTINED: MetricSpec(
        "gauge", "By", "Embedding memory awaiting a reader's word"
    ),
    names.EMBEDDING_BYTES_LIMIT: MetricSpec("gauge", "By", "Embedding memory in all"),
    names.EMBEDDING_CACHE_HITS: MetricSpec("total", "{image}", "Images found in the cache"),
    names.EMBEDDING_CACHE_QUERIES: MetricSpec("total", "{image}", "Images looked up"),
    names.EMBEDDING_DISK_BYTES_USED: MetricSpec("gauge", "By", "Embeddings on disk"),
    names.EMBEDDING_DISK_HITS: MetricSpec("total", "{image}", "Embeddings found whole on disk"),
    names.EMBEDDING_DISK_QUERIES: MetricSpec("total", "{image}", "Embeddings looked up on disk"),
    names.EMBEDDING_DISK_WRITES: MetricSpec("total", "{image}", "Embeddings written to disk"),
    names.EMBEDDING_DISK_DROPPED: MetricSpec("total", "{image}", "Embeddings not written to disk"),
    names.EMBEDDING_DISK_DAMAGED: MetricSpec("total", "{image}", "Embeddings damaged on disk"),
    names.PREFIX_CACHE_HITS: MetricSpec("total", "{token}", "Prompt tokens found in the cache"),
    names.PREFIX_CACHE_QUERIES: MetricSpec("total", "{token}", "Prompt tokens looked up"),
    names.MODEL_PARAMETERS: MetricSpec(
        "gauge", "{parameter}", "Model parameters held by the process"
    ),
    names.TRANSFER_OPEN: MetricSpec("gauge", "{transfer}", "Open transfers and leases"),
    names.TRANSFER_CARRIER: MetricSpec(
        "gauge", "", "1 for what has moved the bytes of a transport since the start: shm, tcp, rdma"
    ),
    names.KV_TRANSFER_DURATION: MetricSpec(
        "histogram", "s", "KV push from posting to completion", DURATION_BUCKETS_S
    ),
    names.KV_TRANSFER_IO: MetricSpec("counter", "By", "KV bytes pushed"),
    names.KV_TRANSFER_FAILED: MetricSpec("counter", "{transfer}", "KV pushes that failed"),
    names.EMBEDDING_TRANSFER_DURATION: MetricSpec(
        "histogram", "s", "Embedding read from posting to completion", DURATION_BUCKETS_S
    ),
    names.EMBEDDING_TRANSFER_IO: MetricSpec("counter", "By", "Embedding bytes read"),
    names.EMBEDDING_TRANSFER_FAILED: MetricSpec("counter", "{transfer}", "Failed embedding reads"),
    names.ENCODER_FORWARD: MetricSpec("total", "{image}", "Images the vision tower has run on"),
    names.ENCODER_BATCH: MetricSpec("total", "{batch}", "Forward passes of the vision tower"),
    names.ENCODER_PATCH: MetricSpec("total", "{patch}", "Patches the vision tower has run on"),
    names.PREPROCESS_RESTART: MetricSpec(
        "total", "{process}", "Preprocessing processes that crashed or hung"
    ),
    names.EMBEDDING_CACHE_EVICTIONS: MetricSpec("total", "{image}", "Embeddings evicted"),
    names.LEASE_EXPIRED: MetricSpec("total", "{lease}", "Leases that ran out"),
    names.EARLY_STEP: MetricSpec(
        "total", "{step}", "First steps begun before a request's KV was complete"
    ),
    names.EARLY_STEP_COMMITTED: MetricSpec("total", "{step}", "Of these, those that gave a token"),
    names.EARLY_STEP_LATE: MetricSpec(
        "total", "{step}", "Of these, those that came to a layer that was not there"
    ),
    names.LEASE_UNKNOWN_RENEWAL: MetricSpec("total", "{lease}", "Renewals of unknown leases"),
    names.PREEMPTION: MetricSpec("total", "{request}", "Requests that lost their blocks"),
    names.REQUEST_RETRY: MetricSpec("counter", "{attempt}", "Attempts after the first"),
    names.ROUTE_ENCODE_OVERLAP: MetricSpec(
        "counter", "{request}", "Requests that prefill began while images were still encoded"
    ),
    names.ROUTE_DECISION: MetricSpec(
        "counter", "{request}", "Attempts by where their prompt was computed: remote or local"
    ),
    names.ROUTE_EXPLORATION: MetricSpec(
        "counter", "{request}", "Those of them that went the way that seemed dearer, to measure it"
    ),
    names.ROUTE_PREDICTED_COST: MetricSpec(
        "counter", "s", "Predicted cost of both ways, summed over those attempts"
    ),
    names.ROUTE_AFFINITY_HIT: MetricSpec(
        "counter", "{image}", "Images sent to the encoder that holds them"
    ),
    names.EVENT_LOOP_TASKS: MetricSpec("gauge", "{task}", "Tasks that have not ended"),
}


def histogram(meter: Meter, name: str) -> Histogram:
    """The histogram of that name; record with ``.record(value, attributes)``."""
    spec = _spec(name, "histogram")
    return meter.create_histogram(
        name, spec.unit, spec.description, explicit_bucket_boundaries_advisory=spec.buckets
    )


def counter(meter: Meter, name: str) -> Counter:
    """The counter of that name; count with ``.add(amount, attributes)``."""
    spec = _spec(name, "counter")
    return meter.create_counter(name, spec.unit, spec.description)


def observe(meter: Meter, readings: Mapping[str, Callable[[], float]]) -> None:
    """Reads gauges and running totals by callback, on the scraping thread.

    A callback must be thread-safe and quick.
    """
    for name, read in readings.items():
        spec = _spec(name, "gauge", "total")
        create = (
            meter.create_observable_gauge
            if spec.kind == "gauge"
            else meter.create_observable_counter
        )
        create(name, [_observer(read)], spec.unit, spec.description)


def observe_carriers(meter: Meter, read: Callable[[], Mapping[str, Sequence[str]]]) -> None:
    """Reads what moves the bytes, by transport, on the scraping thread."""
    spec = _spec(names.TRANSFER_CARRIER, "gauge")

    def observations(options: CallbackOptions) -> Iterable[Observation]:
        return [
            Observation(
                1, {names.EPD_TRANSFER_TRANSPORT: transport, names.EPD_TRANSFER_CARRIER: carrier}
            )
            for transport, carriers in read().items()
            for carrier in carriers
        ]

    meter.create_observable_gauge(
        names.TRANSFER_CARRIER, [observations], spec.unit, spec.description
    )


def _spec(name: str, *kinds: str) -> MetricSpec:
    spec = METRICS[name]
    assert spec.kind in kinds, f"{name} is a {spec.kind}"
    return spec


def _observer(read: Callable[[], float]) -> Callable[[CallbackOptions], Iterable[Observation]]:
    return lambda options: [Observation(read())]
