"""A worker as the router knows it: what it is, how loaded and how fast it is, what it caches."""

import asyncio
import enum
from dataclasses import dataclass

import grpc

from epd.v1 import worker_pb2
from epd.v1.decode_pb2_grpc import DecodeServiceStub
from epd.v1.encoder_pb2_grpc import EncoderServiceStub
from epd.v1.prefill_pb2_grpc import PrefillServiceStub
from services.router.account import WorkerAccount
from services.router.breaker import CircuitBreaker
from services.router.held_blocks import HeldBlocks
from services.router.speed import WorkerSpeed


class Role(enum.Enum):
    """What a worker does; the value is what clients read."""

    ENCODER = "encoder"
    PREFILL = "prefill"
    DECODE = "decode"

    @property
    def service_name(self) -> str:
        """Full name of the gRPC service, which health is watched for."""
        return f"epd.v1.{self.value.capitalize()}Service"

    @property
    def wire(self) -> worker_pb2.WorkerRole:
        """The role in ``GetInfo``."""
        return _WIRE_ROLES[self]


_WIRE_ROLES = {
    Role.ENCODER: worker_pb2.WORKER_ROLE_ENCODER,
    Role.PREFILL: worker_pb2.WORKER_ROLE_PREFILL,
    Role.DECODE: worker_pb2.WORKER_ROLE_DECODE,
}


@dataclass(frozen=True)
class PairingKey:
    """What must be equal for KV to move from one worker to another."""

    protocol_version: int
    model_digest: str
    layer_count: int
    kv_head_count: int
    head_dim: int
    dtype: str
    block_size: int


@dataclass(frozen=True)
class WorkerInfo:
    """What a process says about itself once, at first contact."""

    instance_id: str
    model_name: str
    model_digest: str
    processor_digest: str
    context_length: int
    accepts_images: bool
    max_images: int
    unified: bool = False
    #: None on encoders.
    pairing: PairingKey | None = None


@dataclass(frozen=True)
class ServedModel:
    """The model that the fleet serves, from what its workers say."""

    name: str
    digest: str
    processor_digest: str
    context_length: int
    accepts_images: bool
    max_images: int


@dataclass(frozen=True)
class WorkerState:
    """One line of the list of workers. ``reason`` says why it takes no requests; empty: it does."""

    role: Role
    address: str
    instance_id: str
    in_flight: int
    reason: str


class Worker:
    """One process start of a worker. A restarted process is another worker.

    Args:
        role: What it does.
        address: Its gRPC endpoint.
        info: What it says about itself.
        channel: The channel there.
        held: What its prefix cache holds.
        breaker: Keeps requests away while it fails them.
        speed: How fast it computes prompts (prefill), draws tokens (decode) or encodes.
        local_speed: How fast a unified worker computes prompts.
    """

    def __init__(
        self,
        role: Role,
        address: str,
        info: WorkerInfo,
        channel: grpc.aio.Channel,
        held: HeldBlocks,
        breaker: CircuitBreaker,
        speed: WorkerSpeed,
        local_speed: WorkerSpeed,
    ) -> None:
        self.role = role
        self.address = address
        self.info = info
        self.encoder = EncoderServiceStub(channel)
        self.prefill = PrefillServiceStub(channel)
        self.decode = DecodeServiceStub(channel)
        self.account = WorkerAccount()
        self.held = held
        self.breaker = breaker
        self.speed = speed
        self.local_speed = local_speed
        #: Set for good once the process is taken for gone.
        self.gone = asyncio.Event()

    @property
    def block_size(self) -> int:
        """Tokens per KV block of a language worker."""
        assert self.info.pairing is not None
        return self.info.pairing.block_size

    @property
    def load(self) -> int:
        """Requests (encoder: images) there or on their way, as far as known."""
        return self.account.load
