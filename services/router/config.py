"""Settings of the router."""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from epd.config import option
from epd.rpc.server_config import ServerConfig
from services.router.image_urls.config import ImageUrlConfig

HTTP_OFF = -1


@dataclass(frozen=True, kw_only=True)
class FleetConfig:
    """Which workers there are and when they count as gone."""

    encoders: tuple[str, ...] = option(
        (), help="encoders, each host:port or dns:name:port, separated by commas"
    )
    prefills: tuple[str, ...] = option((), help="prefill workers, likewise")
    decodes: tuple[str, ...] = option(help="decode workers, likewise")
    disaggregation_mode: Literal["auto", "always", "null"] = option(
        "auto",
        help="always: prefill and decode apart; null: unified decode workers alone; auto: what is "
        "predicted to cost less, where there are workers for both",
    )
    encode_overlap: bool = option(
        False, help="let an idle prefill worker begin while later images are still encoded"
    )
    placed_images: int = option(
        65_536, help="images of which the router remembers the encoder", unit="images", minimum=1
    )
    prefill_policy: Literal["predicted", "random"] = option(
        "predicted",
        help="predicted: by predicted TTFT; random: by chance, to compare with",
    )
    discovery_period_s: float = option(
        1.0, help="time between two look-ups of dns: items", unit="s", minimum=0.05
    )
    worker_silence_s: float = option(
        3.0, help="a worker that is silent for so long is gone", unit="s", minimum=0.1
    )
    worker_backoff_s: float = option(
        0.1,
        help="wait before reaching for a worker again, doubled each time",
        unit="s",
        minimum=0.01,
    )
    worker_max_backoff_s: float = option(
        1.0, help="longest wait before reaching for a worker again", unit="s", minimum=0.01
    )
    worker_leave_grace_s: float = option(
        60.0, help="how long requests may go on at a worker that left the set", unit="s", minimum=0
    )
    breaker_faults: int = option(
        5, help="server faults in a row after which a worker gets probes only", minimum=1
    )
    breaker_open_s: float = option(
        2.0, help="time between two probes of such a worker", unit="s", minimum=0.01
    )
    worker_wait_s: float = option(
        30.0,
        help="how long the start waits for workers before serving without them",
        unit="s",
        minimum=0,
    )


@dataclass(frozen=True)
class PrefixConfig:
    """How the router follows what workers have in their prefix caches."""

    prefix_events: bool = option(
        True, help="ask workers what they hold; off: go by what was sent to them"
    )
    prefix_blocks: int = option(
        65_536, help="blocks remembered per worker", unit="blocks", minimum=0
    )
    prefix_bridge_s: float = option(
        1.0,
        help="how long a sent prompt counts as cached before the worker has said so",
        unit="s",
        minimum=0,
    )
    prefix_assumed_s: float = option(
        120.0, help="the same where a worker tells nothing", unit="s", minimum=0
    )


@dataclass(frozen=True)
class RequestConfig:
    """Bounds on requests."""

    request_timeout_s: float = option(
        600.0, help="deadline of a request, unless the client's is shorter", unit="s", minimum=0.1
    )
    first_token_timeout_s: float = option(
        120.0, help="longest time to the first token", unit="s", minimum=0.1
    )
    worker_patience_s: float = option(
        2.0,
        help="how long a request waits for a worker to come where there is none",
        unit="s",
        minimum=0,
    )
    max_requests: int = option(2048, help="most live requests", minimum=1)
    prefill_ahead: int = option(
        64, help="requests between dispatch and first token per prefill worker", minimum=1
    )
    queue_requests: int = option(
        1024, help="requests of one priority that may wait for that, one more is refused", minimum=0
    )
    queue_wait_s: float = option(
        60.0, help="longest wait for it; then a request is refused", unit="s", minimum=0
    )
    max_live_image_bytes: int = option(
        512 << 20, help="most image bytes of all live requests", unit="bytes", minimum=1
    )
    max_images: int = option(16, help="most images in a request", minimum=0)
    max_video_frames: int = option(64, help="most frames of a video", minimum=1)
    max_image_bytes: int = option(
        16 << 20, help="most bytes of an image file", unit="bytes", minimum=1
    )
    max_text_chars: int = option(1 << 20, help="most characters of text in a request", minimum=1)
    max_list_items: int = option(
        16_384,
        help="most messages of a request, most parts of all of them, frames of all videos, stop "
        "tokens and biased tokens",
        minimum=1,
    )
    max_stop_strings: int = option(16, help="most stop strings", minimum=0)
    max_grammar_chars: int = option(
        64 << 10, help="most characters of a JSON schema or regular expression", minimum=1
    )
    max_stop_chars: int = option(256, help="most characters of a stop string", minimum=1)
    coalesce_s: float = option(
        0.002,
        help="least time between two messages of an answer, tokens in between share one",
        unit="s",
        minimum=0,
        maximum=1,
    )
    output_capacity: int = option(
        1024, help="tokens kept for a client that reads slowly", unit="tokens", minimum=1
    )
    max_attempts: int = option(3, help="failed attempts after which a request fails", minimum=1)
    retry_burst: int = option(
        100, help="retries of all requests together that may come at once", minimum=0
    )
    retry_share: float = option(
        0.2, help="retries that each request adds to those", minimum=0, maximum=1
    )
    retry_backoff_s: float = option(
        0.05, help="wait before the second retry, doubled each time", unit="s", minimum=0
    )
    retry_max_backoff_s: float = option(
        1.0, help="longest wait between attempts", unit="s", minimum=0
    )
    culprit_grace_s: float = option(
        0.2,
        help="how long a failed decode call waits for prefill to tell the cause",
        unit="s",
        minimum=0,
    )
    prefill_linger_s: float = option(
        1.0, help="how long prefill may take to report after the answer", unit="s", minimum=0
    )
    control_timeout_s: float = option(
        2.0, help="bound of one control call to an encoder (renew, release)", unit="s", minimum=0.1
    )


@dataclass(frozen=True)
class HttpConfig:
    """The OpenAI-compatible HTTP face, on the same address as gRPC."""

    http_port: int = option(
        0, help="HTTP port, 0 picks a free one, -1 is off", minimum=-1, maximum=65535
    )
    http_connections: int = option(
        1024, help="most open HTTP connections, one more is answered 503", minimum=1
    )
    http_max_prompts: int = option(32, help="most prompts of one completion request", minimum=1)
    http_max_choices: int = option(8, help="most answers to one prompt (n)", minimum=1)
    tool_parser: Literal["hermes", "llama3"] = option(
        "hermes", help="how the model writes tool calls: hermes (Qwen too), llama3"
    )
    http_body_bytes: int = option(
        64 << 20, help="most bytes of an HTTP request's body", unit="bytes", minimum=1
    )
    http_live_body_bytes: int = option(
        512 << 20, help="most bytes of bodies being read at once", unit="bytes", minimum=1
    )
    http_head_timeout_s: float = option(
        20.0, help="longest time for a request's head to arrive", unit="s", minimum=0.1
    )
    http_body_timeout_s: float = option(
        60.0, help="longest time for a request's body to arrive", unit="s", minimum=0.1
    )
    http_send_timeout_s: float = option(
        60.0, help="longest wait for a client that reads nothing", unit="s", minimum=0.1
    )
    http_keep_alive_s: float = option(
        30.0, help="how long an idle HTTP connection stays open", unit="s", minimum=1
    )


@dataclass(frozen=True)
class KserveConfig:
    """The KServe v2 face, on the gRPC port."""

    kserve: bool = option(
        False, help="serve KServe v2 inference too; needs the package tritonclient (epd[kserve])"
    )
    kserve_stream_requests: int = option(
        64, help="most live requests of one ModelStreamInfer call", minimum=1
    )


@dataclass(frozen=True, kw_only=True)
class RouterConfig(ServerConfig):
    """Router: the front door; renders, tokenises, chooses workers and streams the answer."""

    model: Path = option(help="model folder; only tokenizer, template and configuration are read")
    model_name: str = option("", help="name shown to clients; empty takes the folder's name")
    model_digest: str = option("", help="the only model to use; empty takes what the workers hold")
    prompt_threads: int = option(2, help="threads that render and tokenise", minimum=1)
    api_keys: tuple[str, ...] = option(
        (),
        help="keys of clients, each name:key or key; as a variable, since flags are visible to all",
        secret=True,
    )
    api_keys_file: Path | None = option(None, help="file of such keys, one a line")
    tls_client_ca: Path | None = option(
        None,
        help="CA certificates of clients, PEM; with it clients must show a certificate, over gRPC "
        "and HTTP",
    )
    fleet: FleetConfig
    prefixes: PrefixConfig
    requests: RequestConfig
    image_urls: ImageUrlConfig
    http: HttpConfig
    kserve: KserveConfig

    def __post_init__(self) -> None:
        if self.tls_client_ca is not None and not self.tls.on:
            raise ValueError("--tls-client-ca needs --tls-certificate, --tls-key and --tls-ca")

    @property
    def client_ca(self) -> Path | None:
        """CA of clients; None asks them for no certificate."""
        return self.tls_client_ca
