"""What a decode worker tells about itself."""

from collections.abc import Callable, Mapping, Sequence

from epd.encoding.encoder import Encoder
from epd.engine.engine import Engine
from epd.handover.lease import LeaseState
from epd.handover.receiver import KvReceiver
from epd.rpc.service import ServiceContext
from epd.telemetry import semconv as names
from epd.transfer.base import AgentDescriptor
from epd.v1 import worker_pb2
from epd.worker.report import block_load, engine_readings, language_info
from services.decode.config import DecodeConfig
from services.decode.remote import RemoteDecoding


class DecodeReport:
    """Answers of WorkerService and readings of the gauges, from live objects."""

    def __init__(
        self,
        config: DecodeConfig,
        context: ServiceContext,
        agents: Sequence[AgentDescriptor],
        carriers: Callable[[], Mapping[str, Sequence[str]]],
        engine: Engine,
        receiver: KvReceiver,
        remote: RemoteDecoding,
        encoder: Encoder | None,
    ) -> None:
        """``encoder`` is a unified worker's own."""
        self._config = config
        self._context = context
        self._agents = agents
        self._carriers = carriers
        self._engine = engine
        self._receiver = receiver
        self._remote = remote
        self._encoder = encoder

    def info(self) -> worker_pb2.GetInfoResponse:
        """The answer of GetInfo."""
        name = self._config.language.served_name
        info = language_info(self._engine, self._agents, self._carriers(), name)
        info.role = worker_pb2.WORKER_ROLE_DECODE
        info.metrics_address = self._context.telemetry.metrics_address
        info.unified = self._config.unified
        if self._encoder is not None:
            info.processor_digest = self._config.encoding.processor_digest(self._engine.family)
        info.max_images = self._config.encoding.max_images if info.accepts_images else 0
        return info

    def load(self) -> worker_pb2.WatchLoadResponse:
        """The load now."""
        load = block_load(self._engine.stats())
        load.instance_id = self._context.instance_id
        # Routers count a request from its dispatch on: what others have sent shows while its prompt
        # is still computed. A reservation that waits is one of these, or ahead of its Decode call.
        load.waiting_requests += max(self._remote.awaiting_kv, self._receiver.waiting_reservations)
        load.open_transfers = self._open_transfers()
        if self._encoder is not None:
            images = self._encoder.stats()
            load.total_embedding_bytes = images.total_bytes
            load.free_embedding_bytes = images.free_bytes
            load.quarantined_embedding_bytes = images.quarantined_bytes
        load.draining = self._context.server.draining
        return load

    def readings(self, parameter_count: int) -> dict[str, Callable[[], float]]:
        """Gauges and totals by metric name."""
        leases = self._receiver.leases
        return {
            **engine_readings(self._engine.stats, parameter_count),
            **self._encoder_readings(),
            names.REQUEST_WAITING: self._waiting,
            names.DISAGG_DECODE_QUEUE_SIZE: self._waiting,
            names.TRANSFER_OPEN: self._open_transfers,
            names.LEASE_EXPIRED: lambda: leases.counters.expired,
            names.LEASE_UNKNOWN_RENEWAL: lambda: leases.counters.unknown_renewals,
            names.EARLY_STEP: lambda: self._engine.stats().early_steps,
            names.EARLY_STEP_COMMITTED: lambda: self._engine.stats().early_committed,
            names.EARLY_STEP_LATE: lambda: self._engine.stats().early_late,
        }

    def _encoder_readings(self) -> dict[str, Callable[[], float]]:
        if self._encoder is None:
            return {}
        stats = self._encoder.stats
        return {
            names.EMBEDDING_BYTES_USED: lambda: stats().used_bytes,
            names.EMBEDDING_BYTES_FREE: lambda: stats().free_bytes,
            names.EMBEDDING_BYTES_QUARANTINED: lambda: stats().quarantined_bytes,
            names.EMBEDDING_BYTES_LIMIT: lambda: stats().total_bytes,
            names.EMBEDDING_CACHE_HITS: lambda: stats().cache_hits,
            names.EMBEDDING_CACHE_QUERIES: lambda: stats().cache_queries,
            names.ENCODER_FORWARD: lambda: stats().encoded_images,
        }

    def _waiting(self) -> int:
        return self._engine.stats().waiting_requests + self._receiver.waiting_reservations

    def _open_transfers(self) -> int:
        states = (LeaseState.RESERVED, LeaseState.RECEIVING, LeaseState.SEALED)
        return sum(self._receiver.leases.count(state) for state in states)
