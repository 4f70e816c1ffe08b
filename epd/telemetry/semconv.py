"""Every span, attribute and metric name. Nothing else spells one.

Names follow the OpenTelemetry conventions of :data:`CONVENTION_VERSION`; RPC and GenAI names are
not stable there, so a change of conventions is a change of this file.
"""

CONVENTION_VERSION = "1.41.1"
SCHEMA_URL = f"https://opentelemetry.io/schemas/{CONVENTION_VERSION}"
INSTRUMENTATION_SCOPE = "epd"

# Resource.
SERVICE_NAME = "service.name"
SERVICE_NAMESPACE = "service.namespace"
SERVICE_VERSION = "service.version"
SERVICE_INSTANCE_ID = "service.instance.id"

# RPC spans (named by the full method without its leading slash) and metrics.
RPC_SYSTEM_NAME = "rpc.system.name"
RPC_METHOD = "rpc.method"
RPC_RESPONSE_STATUS_CODE = "rpc.response.status_code"
SERVER_ADDRESS = "server.address"
SERVER_PORT = "server.port"
ERROR_TYPE = "error.type"
RPC_SERVER_CALL_DURATION = "rpc.server.call.duration"
RPC_CLIENT_CALL_DURATION = "rpc.client.call.duration"
RPC_DURATION_BUCKETS_S = (0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10)

# HTTP spans (named "{method} {route}") and metrics of the router.
HTTP_REQUEST_METHOD = "http.request.method"
HTTP_ROUTE = "http.route"
HTTP_RESPONSE_STATUS_CODE = "http.response.status_code"
HTTP_SERVER_REQUEST_DURATION = "http.server.request.duration"

# GenAI span of the router: "chat {model}".
OPERATION_CHAT = "chat"
OPERATION_TEXT_COMPLETION = "text_completion"
PROVIDER_EPD = "epd"
GEN_AI_OPERATION_NAME = "gen_ai.operation.name"
GEN_AI_PROVIDER_NAME = "gen_ai.provider.name"
GEN_AI_OUTPUT_TYPE = "gen_ai.output.type"
GEN_AI_REQUEST_MODEL = "gen_ai.request.model"
GEN_AI_REQUEST_STREAM = "gen_ai.request.stream"
GEN_AI_REQUEST_MAX_TOKENS = "gen_ai.request.max_tokens"
GEN_AI_REQUEST_TEMPERATURE = "gen_ai.request.temperature"
GEN_AI_REQUEST_TOP_P = "gen_ai.request.top_p"
GEN_AI_REQUEST_TOP_K = "gen_ai.request.top_k"
GEN_AI_REQUEST_SEED = "gen_ai.request.seed"
GEN_AI_REQUEST_STOP_SEQUENCES = "gen_ai.request.stop_sequences"
GEN_AI_RESPONSE_ID = "gen_ai.response.id"
GEN_AI_RESPONSE_MODEL = "gen_ai.response.model"
GEN_AI_RESPONSE_FINISH_REASONS = "gen_ai.response.finish_reasons"
GEN_AI_RESPONSE_TIME_TO_FIRST_CHUNK = "gen_ai.response.time_to_first_chunk"
GEN_AI_USAGE_INPUT_TOKENS = "gen_ai.usage.input_tokens"
GEN_AI_USAGE_OUTPUT_TOKENS = "gen_ai.usage.output_tokens"
GEN_AI_USAGE_CACHE_READ_INPUT_TOKENS = "gen_ai.usage.cache_read.input_tokens"

# GenAI server metrics.
GEN_AI_SERVER_REQUEST_DURATION = "gen_ai.server.request.duration"
GEN_AI_SERVER_TIME_TO_FIRST_TOKEN = "gen_ai.server.time_to_first_token"
GEN_AI_SERVER_TIME_PER_OUTPUT_TOKEN = "gen_ai.server.time_per_output_token"
REQUEST_DURATION_BUCKETS_S = tuple(0.01 * 2**power for power in range(14))
TIME_TO_FIRST_TOKEN_BUCKETS_S = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0),
)
TIME_PER_OUTPUT_TOKEN_BUCKETS_S = (
    *(0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5),
)

# Stage spans, in the order of a request's life.
SPAN_PREPROCESS = "preprocess"
SPAN_ENCODE = "encode"
SPAN_DISPATCH = "dispatch"
SPAN_RESERVE = "reserve"
SPAN_EMBEDDING_READ = "embedding_read"
SPAN_QUEUE = "queue"
SPAN_PREFILL = "prefill"
SPAN_KV_PUSH = "kv_push"
SPAN_KV_WAIT = "kv_wait"
SPAN_DECODE = "decode"
STAGE_SPANS = (
    SPAN_PREPROCESS,
    SPAN_ENCODE,
    SPAN_DISPATCH,
    SPAN_RESERVE,
    SPAN_EMBEDDING_READ,
    SPAN_QUEUE,
    SPAN_PREFILL,
    SPAN_KV_PUSH,
    SPAN_KV_WAIT,
    SPAN_DECODE,
)
#: What an encoder records of an image: waiting shows in the timings, as spans only work does.
IMAGE_SPANS = (SPAN_PREPROCESS, SPAN_ENCODE)
#: A stage that shows in timings and is no span: an embedding came from the disk tier.
STAGE_DISK_READ = "disk_read"
#: Likewise: digests and headers of a call's images are read, and memory is granted.
STAGE_PLAN = "plan"
#: Likewise: from the engine's first token, or an embedding in place, to the reply that says so.
STAGE_DELIVER = "deliver"
#: Likewise: an image's wait in a unified worker, whose ``queue`` is the engine's.
STAGE_ENCODE_QUEUE = "encode_queue"
EVENT_FIRST_TOKEN = "first_token"

# Own attributes. Durations in nanoseconds where the name says so.
EPD_REQUEST_ID = "epd.request.id"
EPD_OUTCOME = "epd.outcome"
EPD_ATTEMPT = "epd.attempt"
EPD_TRANSFER_ID = "epd.transfer.id"
EPD_TRANSFER_BYTES = "epd.transfer.bytes"
EPD_TRANSFER_DESCRIPTORS = "epd.transfer.descriptors"
EPD_TRANSFER_WRITES = "epd.transfer.writes"
EPD_TRANSFER_TRANSPORT = "epd.transfer.transport"
EPD_TRANSFER_CARRIER = "epd.transfer.carrier"
EPD_TRANSFER_LAYER_NS = "epd.transfer.layer_ns"
EPD_TRANSFER_EXPOSED_NS = "epd.transfer.exposed_ns"
EPD_TRANSFER_HIDDEN_NS = "epd.transfer.hidden_ns"
EPD_EARLY_STEP_COMMITTED = "epd.early_step.committed"
EPD_IMAGE_COUNT = "epd.image.count"
EPD_TOKENS_CACHED = "epd.tokens.cached"
EPD_TOKENS_OUTPUT = "epd.tokens.output"
EPD_STAGE_NS_PREFIX = "epd.stage_ns."

EPD_ROUTE_WAY = "epd.route.way"
EPD_ROUTE_EXPLORED = "epd.route.explored"
EPD_ROUTE_COST_REMOTE_S = "epd.route.cost_remote_s"
EPD_ROUTE_COST_LOCAL_S = "epd.route.cost_local_s"

OUTCOME_OK = "ok"
OUTCOME_CANCELLED = "cancelled"
OUTCOME_ERROR = "error"

# Disaggregation metrics. Without a unit: the Prometheus exporter would append it to the name.
DISAGG_PREFILL_TO_DECODE_LATENCY_MS = "epd_disagg_prefill_to_decode_latency_ms"
DISAGG_KV_TRANSFER_THROUGHPUT_GB_S = "epd_disagg_kv_transfer_throughput_gb_s"
DISAGG_PREFILL_QUEUE_SIZE = "epd_disagg_prefill_queue_size"
DISAGG_DECODE_QUEUE_SIZE = "epd_disagg_decode_queue_size"
LATENCY_BUCKETS_MS = (0.25, 0.5, 1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096)
THROUGHPUT_BUCKETS_GB_S = (0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 50, 100, 200)

# Own metrics.
REQUEST_RUNNING = "epd.request.running"
REQUEST_WAITING = "epd.request.waiting"
REQUEST_QUEUE_DURATION = "epd.request.queue.duration"
KV_BLOCK_USED = "epd.kv_cache.block.usage"
KV_BLOCK_FREE = "epd.kv_cache.block.free"
KV_BLOCK_QUARANTINED = "epd.kv_cache.block.quarantined"
KV_BLOCK_LIMIT = "epd.kv_cache.block.limit"
EMBEDDING_BYTES_USED = "epd.embedding_cache.memory.usage"
EMBEDDING_BYTES_FREE = "epd.embedding_cache.memory.free"
EMBEDDING_BYTES_QUARANTINED = "epd.embedding_cache.memory.quarantined"
EMBEDDING_BYTES_LIMIT = "epd.embedding_cache.memory.limit"
EMBEDDING_CACHE_HITS = "epd.embedding_cache.hit"
EMBEDDING_CACHE_QUERIES = "epd.embedding_cache.query"
EMBEDDING_DISK_BYTES_USED = "epd.embedding_disk.usage"
EMBEDDING_DISK_HITS = "epd.embedding_disk.hit"
EMBEDDING_DISK_QUERIES = "epd.embedding_disk.query"
EMBEDDING_DISK_WRITES = "epd.embedding_disk.write"
EMBEDDING_DISK_DROPPED = "epd.embedding_disk.dropped"
EMBEDDING_DISK_DAMAGED = "epd.embedding_disk.damaged"
PREFIX_CACHE_HITS = "epd.prefix_cache.hit"
PREFIX_CACHE_QUERIES = "epd.prefix_cache.query"
MODEL_PARAMETERS = "epd.model.parameter.count"
TRANSFER_OPEN = "epd.transfer.open"
TRANSFER_CARRIER = "epd.transfer.carrier"
KV_TRANSFER_DURATION = "epd.kv_transfer.duration"
KV_TRANSFER_IO = "epd.kv_transfer.io"
KV_TRANSFER_FAILED = "epd.kv_transfer.failed"
EMBEDDING_TRANSFER_DURATION = "epd.embedding_transfer.duration"
EMBEDDING_TRANSFER_IO = "epd.embedding_transfer.io"
EMBEDDING_TRANSFER_FAILED = "epd.embedding_transfer.failed"
ENCODER_FORWARD = "epd.encoder.forward"
ENCODER_BATCH = "epd.encoder.batch"
ENCODER_PATCH = "epd.encoder.patch"
PREPROCESS_RESTART = "epd.preprocess.restart"
EMBEDDING_CACHE_EVICTIONS = "epd.embedding_cache.eviction"
LEASE_EXPIRED = "epd.lease.expired"
LEASE_UNKNOWN_RENEWAL = "epd.lease.unknown_renewal"
EARLY_STEP = "epd.early_step"
EARLY_STEP_COMMITTED = "epd.early_step.committed"
EARLY_STEP_LATE = "epd.early_step.late"
PREEMPTION = "epd.request.preemption"
REQUEST_RETRY = "epd.request.retry"
ROUTE_AFFINITY_HIT = "epd.route.affinity_hit"
ROUTE_ENCODE_OVERLAP = "epd.route.encode_overlap"
EVENT_LOOP_TASKS = "epd.event_loop.task"
ROUTE_DECISION = "epd.route.decision"
ROUTE_EXPLORATION = "epd.route.exploration"
ROUTE_PREDICTED_COST = "epd.route.predicted_cost"
