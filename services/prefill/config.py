"""Settings of the prefill service."""

from dataclasses import dataclass, field
from typing import Literal

from epd.config import option
from epd.rpc.server_config import ServerConfig
from epd.worker.fault_config import FaultConfig
from epd.worker.language_config import LanguageConfig


@dataclass(frozen=True)
class PairingConfig:
    """How ties to decode workers are made and kept."""

    decodes: tuple[str, ...] = option(
        help="decode workers to pair with, each host:port or dns:name:port"
    )
    discovery_period_s: float = option(
        1.0, help="time between two look-ups of dns: items", unit="s", minimum=0.05
    )
    pair_heartbeat_s: float = option(
        0.25,
        help="period of heartbeats on a pair's stream; less than either side's --pair-silence-s",
        unit="s",
        minimum=0.01,
    )
    pair_silence_s: float = option(
        3.0, help="a peer that is silent for so long is gone", unit="s", minimum=0.05
    )
    pair_backoff_s: float = option(
        0.1, help="wait before pairing again, doubled at each failure", unit="s", minimum=0.01
    )
    pair_max_backoff_s: float = option(
        1.0, help="longest wait before pairing again", unit="s", minimum=0.01
    )
    pair_wait_s: float = option(
        1.0, help="how long a request waits for its decode worker to be paired", unit="s", minimum=0
    )
    reserve_timeout_s: float = option(
        15.0, help="longest wait for blocks on the decode worker", unit="s", minimum=0.1
    )
    control_timeout_s: float = option(
        2.0, help="bound of one control call to a peer (renew, fail, settle)", unit="s", minimum=0.1
    )
    lost_write_s: float = option(
        30.0,
        help="how long a WRITE that ran when its decode worker was lost may still land there: only "
        "then is a worker that has come back told that its blocks are free",
        unit="s",
        minimum=0,
    )
    probe_bytes: int = option(
        4 << 20, help="memory read from each new peer to measure the bandwidth", minimum=4096
    )
    expect_rdma: bool = option(
        False, help="warn when a peer is reached slower than 1 GB/s, as over TCP"
    )


@dataclass(frozen=True, kw_only=True)
class PrefillConfig(ServerConfig):
    """Prefill worker: computes the KV of prompts and pushes it to decode workers."""

    language: LanguageConfig
    pairing: PairingConfig
    queue_timeout_s: float = option(
        30.0, help="longest wait for a place among the running requests", unit="s", minimum=0
    )
    embedding_bytes: int = option(
        64 << 20, help="registered memory that embeddings are read into", unit="bytes", minimum=4096
    )
    encode_timeout_s: float = option(
        120.0,
        help="longest wait for an image that was not encoded when its request came",
        unit="s",
        minimum=0.1,
    )
    embedding_wait_s: float = option(
        10.0, help="longest wait for room for a request's embeddings", unit="s", minimum=0
    )
    push: Literal["layerwise", "after"] = option(
        "layerwise",
        help="push each layer's KV once it is final, or all after the forward pass (to compare)",
    )
    fault: FaultConfig = field(default_factory=FaultConfig)
