"""PrefillService: wire messages to the pipeline."""

from collections.abc import Sequence

from opentelemetry.trace import Tracer

from epd.rpc.aliases import ServicerContext
from epd.transfer.base import AgentDescriptor
from epd.v1 import prefill_pb2, prefill_pb2_grpc
from epd.worker.stages import Stages
from services.prefill.pipeline import PrefillPipeline
from services.prefill.request import job_from_proto


class PrefillServicer(prefill_pb2_grpc.PrefillServiceServicer):
    """See the proto for what the call means."""

    def __init__(
        self, pipeline: PrefillPipeline, tracer: Tracer, agents: Sequence[AgentDescriptor]
    ) -> None:
        """``agents``: this process's transfer endpoints."""
        self._pipeline = pipeline
        self._agents = agents
        self._tracer = tracer

    async def Prefill(self, request: prefill_pb2.PrefillRequest, context: ServicerContext) -> None:
        """Answers by ``context.write``, which waits for a slow reader."""
        job = job_from_proto(request, self._agents)
        await self._pipeline.run(job, Stages(self._tracer), context.write)
