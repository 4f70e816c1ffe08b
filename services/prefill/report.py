"""What a prefill worker tells about itself."""

from collections.abc import Callable, Mapping, Sequence

from epd.engine.engine import Engine
from epd.handover.embedding_memory import EmbeddingMemory
from epd.handover.sender import KvSender
from epd.rpc.service import ServiceContext
from epd.telemetry import semconv as names
from epd.transfer.base import AgentDescriptor
from epd.v1 import worker_pb2
from epd.worker.report import block_load, engine_readings, language_info
from services.prefill.admission import Admission
from services.prefill.config import PrefillConfig


class PrefillReport:
    """Answers of WorkerService and readings of the gauges, from live objects."""

    def __init__(
        self,
        config: PrefillConfig,
        context: ServiceContext,
        agents: Sequence[AgentDescriptor],
        carriers: Callable[[], Mapping[str, Sequence[str]]],
        engine: Engine,
        admission: Admission,
        memory: EmbeddingMemory,
        sender: KvSender,
    ) -> None:
        self._config = config
        self._context = context
        self._agents = agents
        self._carriers = carriers
        self._engine = engine
        self._admission = admission
        self._memory = memory
        self._sender = sender

    def info(self) -> worker_pb2.GetInfoResponse:
        """The answer of GetInfo."""
        name = self._config.language.served_name
        info = language_info(self._engine, self._agents, self._carriers(), name)
        info.role = worker_pb2.WORKER_ROLE_PREFILL
        info.metrics_address = self._context.telemetry.metrics_address
        return info

    def load(self) -> worker_pb2.WatchLoadResponse:
        """The load now."""
        load = block_load(self._engine.stats())
        load.instance_id = self._context.instance_id
        load.running_requests = self._admission.running
        load.waiting_requests = self._admission.waiting
        load.waiting_tokens += self._admission.waiting_tokens
        load.total_embedding_bytes = self._memory.segment.length
        load.quarantined_embedding_bytes = self._memory.quarantined_bytes
        load.free_embedding_bytes = self._free_embedding_bytes()
        load.open_transfers = self._sender.open_pushes
        load.draining = self._context.server.draining
        return load

    def readings(self, parameter_count: int) -> dict[str, Callable[[], float]]:
        """Gauges and totals by metric name."""
        return {
            **engine_readings(self._engine.stats, parameter_count),
            names.REQUEST_RUNNING: lambda: self._admission.running,
            names.REQUEST_WAITING: lambda: self._admission.waiting,
            names.DISAGG_PREFILL_QUEUE_SIZE: lambda: self._admission.waiting,
            names.TRANSFER_OPEN: lambda: self._sender.open_pushes,
            names.EMBEDDING_BYTES_USED: lambda: self._memory.used_bytes,
            names.EMBEDDING_BYTES_FREE: self._free_embedding_bytes,
            names.EMBEDDING_BYTES_QUARANTINED: lambda: self._memory.quarantined_bytes,
            names.EMBEDDING_BYTES_LIMIT: lambda: self._memory.segment.length,
        }

    def _free_embedding_bytes(self) -> int:
        memory = self._memory
        return memory.segment.length - memory.used_bytes - memory.quarantined_bytes
