"""The life of one Prefill call.

A request passes, in this order: the admission queue (holds nothing), Reserve on the decode worker,
the embedding memory, the engine (its own queue, then its forward pass), the push. Each is asked for
only by a request that holds all earlier ones, and none is needed to give a later one back, so
nobody waits in a circle.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable, Coroutine
from contextlib import AsyncExitStack
from typing import Any, TypeVar

from epd.block_hashes import block_hashes
from epd.engine.grammar import Matcher
from epd.engine.requests import PrefillDone
from epd.errors import DuplicateRequestError
from epd.handover.push import KvPush
from epd.handover.sender import KvSender
from epd.handover.write_ledger import PushReport
from epd.rpc.request_context import new_id
from epd.telemetry import semconv
from epd.telemetry.spans import Attribute
from epd.v1 import prefill_pb2
from epd.wire.finish_reason import finish_reason_to_proto
from epd.wire.timings import timings_to_proto
from epd.wire.top_logprobs import top_to_proto
from epd.worker.stages import Stages
from services.prefill.admission import Admission
from services.prefill.computation import Computation
from services.prefill.decode_peers import DecodePeers
from services.prefill.embeddings import Custody, Embeddings
from services.prefill.metrics import PrefillMetrics
from services.prefill.request import PrefillJob

T = TypeVar("T")
#: So many tokens are hashed in well under a millisecond; more are not hashed on the event loop.
INLINE_HASH_TOKENS = 8192
#: Sends one event to the router; waits while its stream takes no more.
Emit = Callable[[prefill_pb2.PrefillResponse], Awaitable[None]]


class PrefillPipeline:
    """Serves Prefill calls; one object per process.

    Args:
        admission: The queue before everything else.
        peers: The decode workers.
        embeddings: Takes charge of the images' handles.
        computation: From embeddings to the first token.
        sender: Pushes; its :meth:`KvSender.on_layer` is the engine's layer hook.
        metrics: What is measured beside the spans.
    """

    def __init__(
        self,
        admission: Admission,
        peers: DecodePeers,
        embeddings: Embeddings,
        computation: Computation,
        sender: KvSender,
        metrics: PrefillMetrics,
    ) -> None:
        self._admission = admission
        self._peers = peers
        self._embeddings = embeddings
        self._computation = computation
        self._sender = sender
        self._metrics = metrics
        self._live: set[str] = set()

    async def run(self, job: PrefillJob, stages: Stages, emit: Emit) -> None:
        """One request. Cancelling it stops the engine within a step and tells decode.

        Raises:
            EpdError: why the request failed. By then decode has been told or is being told, and
                every hold on blocks, embeddings and reservation is given back or settling.
        """
        with self._embeddings.custody(job.handles) as custody:
            if job.transfer_id in self._live:
                raise DuplicateRequestError(
                    f"transfer {job.transfer_id} is being prefilled already"
                )
            self._live.add(job.transfer_id)
            try:
                # First of all: a malformed constraint is told by its name, before decode, which
                # finds it too, can refuse the reservation for it.
                matcher = await self._computation.matcher(job)
                async with AsyncExitStack() as stack:
                    with stages.stage(semconv.SPAN_QUEUE):
                        queue_ns = await stack.enter_async_context(
                            self._admission.slot(len(job.token_ids))
                        )
                    # Recorded when the request leaves: no first token waits for a histogram.
                    stack.callback(self._metrics.record_queue, queue_ns)
                    await self._hand_over(job, matcher, custody, stages, emit)
            finally:
                self._live.discard(job.transfer_id)

    async def _hand_over(
        self,
        job: PrefillJob,
        matcher: Matcher | None,
        custody: Custody,
        stages: Stages,
        emit: Emit,
    ) -> None:
        """From Reserve to the sealed KV."""
        asked_ns = time.monotonic_ns()
        peer = await self._peers.find(job.decode_address, job.decode_instance_id)
        engine_id = new_id()
        hashes = await _hashes(job, peer.target.layout.block_size)
        async with self._sender.push(
            engine_id,
            job.transfer_id,
            peer.target,
            len(job.token_ids),
            hashes,
            # The push knows when nothing reads the blocks any more, however this call ends.
            release=lambda: self._computation.release(engine_id),
        ) as push:
            stages.count(semconv.SPAN_RESERVE, time.monotonic_ns() - asked_ns)
            compute = self._computation.run(job, engine_id, matcher, custody, stages)
            try:
                done = await _unless_failed(push, compute)
            except BaseException:
                if push.failure.done():  # most WRITEs run, and fail, beside the computation
                    self._metrics.kv.record_failure()
                raise
            stages.count(semconv.STAGE_DELIVER, time.monotonic_ns() - done.forward_ended_ns)
            first_token = _first_token(done, stages)
            if done.finish_reason is not None:
                # Leaving without a seal gives the reservation back.
                await emit(first_token)
                return
            sealing = asyncio.create_task(self._seal(push, done, stages))
            try:
                await emit(first_token)
                report = await sealing
            finally:
                sealing.cancel()
                await asyncio.wait({sealing})
        await emit(_pushed(report))

    async def _seal(self, push: KvPush, done: PrefillDone, stages: Stages) -> PushReport:
        start_ns = done.forward_ended_ns - done.forward_ns
        try:
            report = await self._sender.finish(
                push, done.token_id, done.logprob, done.forward_ended_ns
            )
        except BaseException as error:
            self._metrics.kv.record_failure()
            stages.add(semconv.SPAN_KV_PUSH, start_ns, time.monotonic_ns(), error=error)
            raise
        self._metrics.kv.record(report.byte_count, report.hidden_ns + report.exposed_ns)
        attributes: dict[str, Attribute] = {
            semconv.EPD_TRANSFER_ID: push.transfer_id,
            semconv.EPD_TRANSFER_BYTES: report.byte_count,
            semconv.EPD_TRANSFER_DESCRIPTORS: report.descriptor_count,
            semconv.EPD_TRANSFER_WRITES: report.write_count,
            semconv.EPD_TRANSFER_TRANSPORT: push.target.agent.transport,
            semconv.EPD_TRANSFER_LAYER_NS: report.layer_ns,
            semconv.EPD_TRANSFER_EXPOSED_NS: report.exposed_ns,
            semconv.EPD_TRANSFER_HIDDEN_NS: report.hidden_ns,
        }
        end_ns = done.forward_ended_ns + report.exposed_ns
        stages.add(semconv.SPAN_KV_PUSH, start_ns, end_ns, attributes)
        return report


async def _hashes(job: PrefillJob, block_size: int) -> list[bytes]:
    """What a decode worker may hold of the prompt."""
    if len(job.token_ids) <= INLINE_HASH_TOKENS:
        return block_hashes(job.token_ids, job.images, block_size)
    return await asyncio.to_thread(block_hashes, job.token_ids, job.images, block_size)


async def _unless_failed(push: KvPush, work: Coroutine[None, None, T]) -> T:
    """The work's result; a push that fails meanwhile cancels the work and is raised instead."""
    task = asyncio.create_task(work)
    either: set[asyncio.Future[Any]] = {task, push.failure}
    try:
        await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise push.failure.result().with_traceback(None)
        return task.result()
    finally:
        task.cancel()
        await asyncio.wait({task})


def _first_token(done: PrefillDone, stages: Stages) -> prefill_pb2.PrefillResponse:
    return prefill_pb2.PrefillResponse(
        first_token=prefill_pb2.FirstToken(
            token_id=done.token_id,
            logprob=done.logprob,
            finish_reason=finish_reason_to_proto(done.finish_reason),
            cached_tokens=done.cached_tokens,
            timings=timings_to_proto(stages.durations_ns),
            service_ns=stages.service_ns(),
            top_logprobs=None if done.top_logprobs is None else top_to_proto(done.top_logprobs),
        )
    )


def _pushed(report: PushReport) -> prefill_pb2.PrefillResponse:
    return prefill_pb2.PrefillResponse(
        pushed=prefill_pb2.Pushed(
            byte_count=report.byte_count,
            descriptor_count=report.descriptor_count,
            write_count=report.write_count,
            exposed_ns=report.exposed_ns,
            hidden_ns=report.hidden_ns,
            kv_exposed_ns=report.kv_exposed_ns,
        )
    )
