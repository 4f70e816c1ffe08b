"""gRPC channel arguments. gRPC ignores a misspelt name without a word, so tests compare them."""

MIB = 1024 * 1024
#: Where image files enter: client, router and encoder.
IMAGE_MESSAGE_BYTES = 32 * MIB
#: Everywhere else: tensors travel over the transfer library, so nothing larger is legitimate.
MESSAGE_BYTES = 4 * MIB

# Keepalive only finds dead links, and slowly; hung workers are found by the load heartbeat. The
# client's period must not fall below the server's minimum, or the server ends the connection.
KEEPALIVE_TIME_MS = 60_000
KEEPALIVE_TIMEOUT_MS = 20_000
MIN_PING_INTERVAL_MS = 30_000

#: A server takes in one call per turn of its event loop. Those that wait for that are cancelled by
#: gRPC after 30 s, with no status of ours. Deadlines shall end such waits: this is far longer.
MAX_UNACCEPTED_S = 3600

ChannelOptions = list[tuple[str, int | str]]


def server_options(message_bytes: int = MESSAGE_BYTES) -> ChannelOptions:
    """Options of a server that accepts messages of up to ``message_bytes``."""
    return [
        *_message_limits(message_bytes),
        *_keepalive(),
        ("grpc.http2.min_ping_interval_without_data_ms", MIN_PING_INTERVAL_MS),
        ("grpc.server_max_unrequested_time_in_server", MAX_UNACCEPTED_S),
        # Two servers on one port would split the calls at random.
        ("grpc.so_reuseport", 0),
    ]


def channel_options(message_bytes: int = MESSAGE_BYTES) -> ChannelOptions:
    """Options of a channel. Only the router retries, and it does so itself."""
    return [
        *_message_limits(message_bytes),
        *_keepalive(),
        ("grpc.enable_retries", 0),
        # A restarted worker must be reachable again soon; the default backs off to two minutes.
        ("grpc.initial_reconnect_backoff_ms", 100),
        ("grpc.min_reconnect_backoff_ms", 500),
        ("grpc.max_reconnect_backoff_ms", 1_000),
        # Answers are tokens and handles. A window that grows with the bandwidth would let each
        # stream that nobody reads keep megabytes of them; without it is 64 KiB.
        ("grpc.http2.bdp_probe", 0),
        # Channels to the same address share no connection: closing one never disturbs another.
        ("grpc.use_local_subchannel_pool", 1),
    ]


def _message_limits(message_bytes: int) -> ChannelOptions:
    return [
        ("grpc.max_receive_message_length", message_bytes),
        ("grpc.max_send_message_length", message_bytes),
    ]


def _keepalive() -> ChannelOptions:
    return [
        ("grpc.keepalive_time_ms", KEEPALIVE_TIME_MS),
        ("grpc.keepalive_timeout_ms", KEEPALIVE_TIMEOUT_MS),
        ("grpc.keepalive_permit_without_calls", 0),
    ]
