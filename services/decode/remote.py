"""Requests whose KV a prefill worker pushes here."""

from collections.abc import AsyncGenerator
from contextlib import AsyncExitStack, aclosing

from opentelemetry.trace import Tracer

from epd.cleanup import CleanupTasks
from epd.engine.async_engine import AsyncEngine
from epd.engine.grammar import Matcher
from epd.engine.kv_arrival import KvArrival
from epd.engine.requests import Admitted, EngineEvent, EngineRequest, Failed, Preempted, RequestMode
from epd.errors import DuplicateRequestError, EpdError
from epd.handover.arriving_transfer import ArrivingTransfer
from epd.handover.receiver import KvReceiver
from epd.handover.sealed_transfer import SealedTransfer
from epd.telemetry import semconv
from epd.v1 import decode_pb2
from epd.worker.stages import Stages
from services.decode.answer import Emit, PromptFacts, send_answer
from services.decode.early_offer import EarlyOffer
from services.decode.request import DecodeJob


class RemoteDecoding:
    """Waits for the seal, then decodes. May be called before or after the transfer's Reserve.

    Args:
        engine: Draws the tokens.
        receiver: Takes the KV in.
        tracer: The service's.
        kv_wait_s: Longest wait for the seal.
        max_buffered_tokens: Tokens held for a slow reader.
        early_start: Let the engine begin while the last of the KV still arrives.
    """

    def __init__(
        self,
        engine: AsyncEngine,
        receiver: KvReceiver,
        tracer: Tracer,
        *,
        kv_wait_s: float,
        max_buffered_tokens: int,
        early_start: bool = False,
    ) -> None:
        self._engine = engine
        self._receiver = receiver
        self._tracer = tracer
        self._kv_wait_s = kv_wait_s
        self._max_buffered_tokens = max_buffered_tokens
        self._early_start = early_start
        self._offers = CleanupTasks()
        self._live: set[str] = set()
        #: Requests whose KV is not complete yet.
        self.awaiting_kv = 0

    async def run(self, job: DecodeJob, transfer_id: str, emit: Emit) -> None:
        """One request. Cancelling it leaves a tombstone for the transfer, or ends the decode.

        Raises:
            DuplicateRequestError: the transfer is being decoded already.
            EpdError: why the KV did not come, or why the engine gave up.
        """
        if transfer_id in self._live:
            raise DuplicateRequestError(f"transfer {transfer_id} is being decoded already")
        self._live.add(transfer_id)
        try:
            await self._run(job, transfer_id, emit)
        finally:
            self._live.discard(transfer_id)

    async def _run(self, job: DecodeJob, transfer_id: str, emit: Emit) -> None:
        stages = Stages(self._tracer)
        async with AsyncExitStack() as stack:
            with stages.stage(semconv.SPAN_KV_WAIT) as attributes:
                attributes[semconv.EPD_TRANSFER_ID] = transfer_id
                self.awaiting_kv += 1
                try:
                    matcher = await self._matcher(job, transfer_id)
                    offer: EarlyOffer | None = None
                    if self._early_start and matcher is None:
                        offer = await stack.enter_async_context(self._offer(job, transfer_id))
                    sealed = await self._receiver.wait_sealed(transfer_id, self._kv_wait_s)
                finally:
                    self.awaiting_kv -= 1
                attributes[semconv.EPD_TRANSFER_BYTES] = sealed.byte_count
            await self._decode(job, transfer_id, sealed, matcher, offer, stages, emit)

    async def _decode(
        self,
        job: DecodeJob,
        transfer_id: str,
        sealed: SealedTransfer,
        matcher: Matcher | None,
        offer: EarlyOffer | None,
        stages: Stages,
        emit: Emit,
    ) -> None:
        block_size = self._engine.engine.pool.block_size
        facts = PromptFacts(
            job.prompt_tokens,
            sum(image.length for image in job.images),
            sealed.cached_block_count * block_size,
        )
        events = self._take(job, transfer_id, sealed, matcher, offer)
        async with aclosing(events):
            try:
                # Submits, with nothing awaited since the blocks were taken: no cancel in between
                # can leave them without an owner.
                first = await anext(events)
            except EpdError:
                self._engine.engine.pool.free(sealed.block_ids)
                raise
            if isinstance(first, Failed):
                raise first.error
            if isinstance(first, Preempted):  # while it waited to join, holding its blocks
                await emit(decode_pb2.DecodeResponse(preempted=decode_pb2.Preempted()))
                return
            assert isinstance(first, Admitted)
            await send_answer(events, first, facts, stages, emit, self._max_buffered_tokens)

    async def _matcher(self, job: DecodeJob, transfer_id: str) -> Matcher | None:
        try:
            return await self._engine.matcher(job.sampling, job.emitted)
        except BaseException:
            # As wait_sealed does once it waits: KV that nobody wants is refused or given back.
            self._receiver.cancel(transfer_id)
            raise

    def _offer(self, job: DecodeJob, transfer_id: str) -> EarlyOffer:
        def request(arriving: ArrivingTransfer) -> EngineRequest:
            return self._request(
                job,
                transfer_id,
                arriving.block_ids,
                arriving.first_token,
                arrival=arriving.arrival,
            )

        return EarlyOffer(self._engine, self._receiver, self._offers, transfer_id, request)

    def _take(
        self,
        job: DecodeJob,
        transfer_id: str,
        sealed: SealedTransfer,
        matcher: Matcher | None,
        offer: EarlyOffer | None,
    ) -> AsyncGenerator[EngineEvent, None]:
        """The request's events, on blocks that are the engine's once the first is asked for."""
        block_ids = self._receiver.take(transfer_id)
        try:
            begun = offer.sealed() if offer is not None else None
        except EpdError:
            self._engine.engine.pool.free(block_ids)
            raise
        if begun is not None:
            return begun
        return self._engine.generate(
            self._request(job, transfer_id, block_ids, sealed.first_token, matcher)
        )

    @staticmethod
    def _request(
        job: DecodeJob,
        transfer_id: str,
        block_ids: tuple[int, ...],
        first_token: int,
        matcher: Matcher | None = None,
        arrival: KvArrival | None = None,
    ) -> EngineRequest:
        return EngineRequest(
            request_id=transfer_id,
            token_ids=job.token_ids,
            sampling=job.sampling,
            mode=RequestMode.PREFILLED,
            emitted_count=job.emitted_count,
            images=job.images,
            position_delta=job.position_delta,
            block_ids=block_ids,
            first_token=first_token,
            arrival=arrival,
            matcher=matcher,
        )
