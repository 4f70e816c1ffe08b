"""A worker as the router knows it: what it is, how loaded it is, what the router has sent it."""

import asyncio
import contextlib
import enum
from collections.abc import Iterator
from dataclasses import dataclass

import grpc

from epd.v1 import worker_pb2
from epd.v1.decode_pb2_grpc import DecodeServiceStub
from epd.v1.encoder_pb2_grpc import EncoderServiceStub
from epd.v1.prefill_pb2_grpc import PrefillServiceStub


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

    Work is booked when it is sent and given back on every path, so ``in_flight`` is exact for this
    router. What other routers have sent shows in the worker's own reports.
    """

    def __init__(
        self, role: Role, address: str, info: WorkerInfo, channel: grpc.aio.Channel
    ) -> None:
        self.role = role
        self.address = address
        self.info = info
        self.encoder = EncoderServiceStub(channel)
        self.prefill = PrefillServiceStub(channel)
        self.decode = DecodeServiceStub(channel)
        self.in_flight = 0
        #: Set for good once the process is taken for gone.
        self.gone = asyncio.Event()
        self._foreign_load = 0

    @property
    def load(self) -> int:
        """Requests (encoder: images) there or on their way, as far as known."""
        return self.in_flight + self._foreign_load

    def report_load(self, requests: int) -> None:
        """Takes a worker's own count. What this router has in flight there is part of it."""
        self._foreign_load = max(0, requests - self.in_flight)

    @contextlib.contextmanager
    def booked(self, amount: int = 1) -> Iterator[None]:
        """Counts work as in flight until the block is left, however that happens."""
        self.in_flight += amount
        try:
            yield
        finally:
            self.in_flight -= amount
