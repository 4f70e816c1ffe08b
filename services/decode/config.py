"""Settings of the decode service."""

from dataclasses import dataclass, field

from epd.config import option
from epd.encoding.encoding_config import EncodingConfig
from epd.rpc.server_config import ServerConfig
from epd.worker.language_config import LanguageConfig


@dataclass(frozen=True)
class ReceiveConfig:
    """How KV of prefill workers is taken in."""

    pair_heartbeat_s: float = option(
        0.25,
        help="period of heartbeats on a pair's stream; less than either side's --pair-silence-s",
        unit="s",
        minimum=0.01,
    )
    pair_silence_s: float = option(
        3.0, help="a peer that is silent for so long is gone", unit="s", minimum=0.05
    )
    reserve_wait_s: float = option(
        10.0, help="longest wait of a reservation for free blocks", unit="s", minimum=0
    )
    max_reserve_waiting: int = option(
        64, help="reservations that may wait, one more is refused", minimum=0
    )
    progress_timeout_s: float = option(
        5.0,
        help="a transfer fails when neither a layer nor a renewal is seen for so long",
        unit="s",
        minimum=0.1,
    )
    quarantine_hold_s: float = option(
        30.0,
        help="how long blocks stay out of use when a peer that may still write to them is gone",
        unit="s",
        minimum=0,
    )
    peer_share: float = option(
        0.5, help="most of the pool that one peer may reserve", minimum=0.01, maximum=1.0
    )
    max_transfers: int = option(
        1024,
        help="transfers that may be open at once, quarantined ones included, and Reserves that one "
        "prefill worker may have under way",
        minimum=1,
    )
    kv_wait_s: float = option(
        60.0, help="longest wait of a request for its sealed KV", unit="s", minimum=0.1
    )
    pipelined_start: bool = option(
        False,
        help="begin a request's first step while the last layers of its KV still arrive, where the "
        "wait is predicted to be shorter than a step; prefill then sends each layer by itself",
    )
    kv_checksum: bool = option(
        False,
        help="compare all KV with what prefill has sent before it is used; for debugging, "
        "it costs a hash of every byte on both sides",
    )


@dataclass(frozen=True, kw_only=True)
class DecodeConfig(ServerConfig):
    """Decode worker: takes the KV of prompts and draws the tokens after the first."""

    language: LanguageConfig
    receive: ReceiveConfig
    encoding: EncodingConfig = field(default_factory=EncodingConfig)
    unified: bool = option(
        False, help="serve requests alone: load the vision half too, encode and prefill here"
    )
    stream_buffer_tokens: int = option(
        4096, help="tokens held for a slow reader before its request is ended", minimum=1
    )
