"""Workers that speak the protocol and fail on demand, in this process, on real sockets.

What they "generate" depends on seed and position only, like the real ones, so an answer that was
continued elsewhere can be compared with one that was not.
"""

import asyncio
import contextlib
import socket
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from epd.block_hashes import block_hashes
from epd.errors import EpdError
from epd.rpc.request_context import new_id
from epd.rpc.status import abort
from epd.rpc.worker_service import WorkerServicer
from epd.v1 import (
    common_pb2,
    decode_pb2,
    decode_pb2_grpc,
    encoder_pb2,
    encoder_pb2_grpc,
    prefill_pb2,
    prefill_pb2_grpc,
    worker_pb2,
    worker_pb2_grpc,
)
from tests.router.model_folder import CONTEXT_LENGTH, END, IMAGE, token_ids
from tests.support.kept_port import keep_port

ANSWER = token_ids("the quick brown fox jumps over the lazy dog. " * 20)
PLACEHOLDERS = (IMAGE,) * 5


def answer_token(seed: int, position: int, answer: list[int] = ANSWER) -> int:
    """The token at ``position`` of the answer; the seed shifts the text."""
    return answer[(seed + position) % len(answer)]


class Fabric:
    """Stands for the data plane: which transfers are sealed. Shared by the fakes of a fleet."""

    def __init__(self) -> None:
        self._sealed: dict[str, asyncio.Event] = {}

    def sealed(self, transfer_id: str) -> asyncio.Event:
        """Set once prefill has pushed everything."""
        return self._sealed.setdefault(transfer_id, asyncio.Event())


class FakeWorker:
    """What all fakes have: health, GetInfo, load, counters, and a way to die."""

    role: worker_pb2.WorkerRole

    def __init__(
        self,
        fabric: Fabric | None = None,
        *,
        host: str = "127.0.0.1",
        port: int = 0,
        kv_events: Callable[[], AsyncIterator[Any]] | None = None,
        **info: Any,
    ) -> None:
        self.fabric = fabric or Fabric()
        self.instance_id = new_id()
        self.calls: Counter[str] = Counter()
        self.open_calls = 0
        #: Load reports sent on all streams together.
        self.reports = 0
        self.answer = ANSWER
        self.time_left_s: list[float] = []
        self.traceparents: list[str] = []
        self._handlers: set[asyncio.Task[Any]] = set()
        self._breaking: EpdError | None = None
        self.requests: list[Any] = []
        self.load = worker_pb2.WatchLoadResponse(instance_id=self.instance_id)
        self.info = worker_pb2.GetInfoResponse(
            **{
                "role": self.role,
                "instance_id": self.instance_id,
                "model_name": "fake",
                "model_digest": "d1",
                "processor_digest": "p1",
                "context_length": CONTEXT_LENGTH,
                "accepts_images": True,
                "max_images": 8,
                **info,
            }
        )
        if self.role != worker_pb2.WORKER_ROLE_ENCODER and not info.get("kv_layout"):
            self.info.kv_layout.CopyFrom(common_pb2.KvLayout(block_size=32, dtype="float32"))
        #: Holds back identity and load reports while cleared, as a hung process does.
        self.alive = asyncio.Event()
        self.alive.set()
        #: Streams prefix-cache changes; None: the worker tells nothing.
        self.kv_events = kv_events
        #: Raised instead of doing the main call, as often as it is listed; None lets one through.
        self.failures: list[EpdError | None] = []
        self.worker_service = _HangingWorkerService(self)
        self._host = host
        self._port = port
        self._kept: socket.socket | None = None

    @property
    def address(self) -> str:
        """Where it listens."""
        return f"{self._host}:{self._port}"

    def report(self) -> worker_pb2.WatchLoadResponse:
        report = worker_pb2.WatchLoadResponse()
        report.CopyFrom(self.load)
        return report

    async def start(self) -> None:
        """Serves."""
        self.health = health.aio.HealthServicer()  # type: ignore[attr-defined]
        self.server = grpc.aio.server(options=[("grpc.so_reuseport", 0)])
        health_pb2_grpc.add_HealthServicer_to_server(self.health, self.server)
        worker_pb2_grpc.add_WorkerServiceServicer_to_server(self.worker_service, self.server)
        self.add_service()
        if not self._port:  # to be the same after a restart
            self._kept = keep_port(self.address)
            self._port = self._kept.getsockname()[1]
        self.server.add_insecure_port(self.address)
        await self.server.start()
        await self.set_health(True)

    async def set_health(self, serving: bool) -> None:
        """Changes what health checks say."""
        status = health_pb2.HealthCheckResponse
        await self.health.set(self.service_name, status.SERVING if serving else status.NOT_SERVING)

    async def stop(self) -> None:
        """Dies: all calls break."""
        await self.server.stop(0)

    @property
    def service_name(self) -> str:
        """Full name of the main service."""
        return {1: "epd.v1.EncoderService", 2: "epd.v1.PrefillService", 3: "epd.v1.DecodeService"}[
            self.role
        ]

    def add_service(self) -> None:
        """Registers the main service."""
        raise NotImplementedError

    @contextlib.asynccontextmanager
    async def call(self, name: str, request: Any, context: Any) -> AsyncIterator[None]:
        """Counts a call while it is open; fails it when a failure is listed."""
        self.calls[name] += 1
        self.requests.append(request)
        metadata = dict(context.invocation_metadata())
        self.traceparents.append(str(metadata.get("traceparent", "")))
        self.time_left_s.append(context.time_remaining() or 0.0)
        self.open_calls += 1
        handler = asyncio.current_task()
        assert handler is not None
        self._handlers.add(handler)
        try:
            if self.failures and (failure := self.failures.pop(0)) is not None:
                await abort(context, failure, "")
            yield
        except asyncio.CancelledError:
            if self._breaking is None:
                raise
            handler.uncancel()
            await abort(context, self._breaking, "")
        finally:
            self._handlers.discard(handler)
            self.open_calls -= 1

    async def break_calls(self, error: EpdError) -> None:
        """Ends all open calls with an error."""
        self._breaking = error
        for handler in self._handlers:
            handler.cancel()


class _HangingWorkerService(WorkerServicer):
    """The real one, except that it stops when the fake plays dead."""

    def __init__(self, worker: FakeWorker) -> None:
        super().__init__(
            lambda: worker.info, worker.report, heartbeat_s=0.05, kv_events=worker.kv_events
        )
        self._worker = worker

    async def GetInfo(self, request: Any, context: Any) -> worker_pb2.GetInfoResponse:
        await self._worker.alive.wait()
        return await super().GetInfo(request, context)

    async def WatchKvEvents(self, request: Any, context: Any) -> AsyncIterator[Any]:
        if self._worker.kv_events is None:
            await context.abort(grpc.StatusCode.UNIMPLEMENTED, "no prefix cache")
        async for event in super().WatchKvEvents(request, context):
            yield event

    async def WatchLoad(self, request: Any, context: Any) -> AsyncIterator[Any]:
        async for report in super().WatchLoad(request, context):
            await self._worker.alive.wait()
            self._worker.reports += 1
            yield report


class FakeEncoder(FakeWorker, encoder_pb2_grpc.EncoderServiceServicer):
    """Plans every image at once and has it ready after ``encode_s``."""

    role = worker_pb2.WORKER_ROLE_ENCODER

    def __init__(self, fabric: Fabric | None = None, **info: Any) -> None:
        super().__init__(fabric, **info)
        self.encode_s = 0.0
        #: Holds images back as long as it is false.
        self.ready_when: Callable[[], bool] = lambda: True
        self.lease_ms = 10_000
        self.held: set[str] = set()
        self.settled: list[bool] = []
        self.seen: list[bytes] = []
        #: Calls of which every image has been planned and none is ready.
        self.encoding = 0
        self.renewals = 0

    def add_service(self) -> None:
        encoder_pb2_grpc.add_EncoderServiceServicer_to_server(self, self.server)

    async def Encode(self, request: Any, context: Any) -> AsyncIterator[Any]:
        async with self.call("Encode", request, context):
            for image in request.images:
                self.seen.append(image.digest)
                handle = common_pb2.EmbeddingHandle(
                    handle_id=new_id(), digest=image.digest, lease_ms=self.lease_ms
                )
                self.held.add(handle.handle_id)
                yield encoder_pb2.EncodeResponse(
                    planned=encoder_pb2.Planned(
                        image_index=image.image_index,
                        grid=common_pb2.ImageGrid(temporal=1, height=2, width=2),
                        anchor_token_id=IMAGE,
                        placeholder_ids=PLACEHOLDERS,
                        position_delta=-3,
                        handle=handle,
                    )
                )
            self.encoding += 1
            try:
                await asyncio.sleep(self.encode_s)
                while not self.ready_when():
                    await asyncio.sleep(0.005)
            finally:
                self.encoding -= 1
            for image in request.images:
                yield encoder_pb2.EncodeResponse(
                    ready=encoder_pb2.Ready(
                        image_index=image.image_index,
                        timings=[common_pb2.StageTiming(stage="encode", duration_ns=1000)],
                    )
                )

    async def Renew(self, request: Any, context: Any) -> Any:
        self.renewals += 1
        unknown = [handle for handle in request.handle_ids if handle not in self.held]
        return encoder_pb2.EncoderServiceRenewResponse(unknown_handle_ids=unknown)

    async def Release(self, request: Any, context: Any) -> Any:
        self.held -= set(request.handle_ids)
        self.settled.append(request.settled)
        return encoder_pb2.ReleaseResponse()


class FakePrefill(FakeWorker, prefill_pb2_grpc.PrefillServiceServicer):
    """Draws the first token after ``prefill_s``, seals, and says so after ``hold_open_s``."""

    role = worker_pb2.WORKER_ROLE_PREFILL

    def __init__(self, fabric: Fabric | None = None, **info: Any) -> None:
        super().__init__(fabric, **info)
        self.prefill_s = 0.0
        #: Above 0 it has a prefix cache, and each token that is not in it takes so long.
        self.token_s = 0.0
        self.cache: set[bytes] = set()
        #: Held while it computes; a test may hold it too.
        self.engine = asyncio.Lock()
        self.hold_open_s = 0.0
        self.seals = True
        self.first_token_ends = False
        #: What it says about the time from call to first token; 0 says nothing.
        self.service_ns = 0
        self.arrived_s: list[float] = []
        self.drawn_s: list[float] = []
        #: As ``failures``, but after ``prefill_s``.
        self.late_failures: list[EpdError] = []
        self.encoder: FakeEncoder | None = None
        self.after_first_token: Callable[[], Awaitable[None]] | None = None

    def add_service(self) -> None:
        prefill_pb2_grpc.add_PrefillServiceServicer_to_server(self, self.server)

    async def Prefill(self, request: Any, context: Any) -> AsyncIterator[Any]:
        self.arrived_s.append(time.monotonic())
        async with self.call("Prefill", request, context):
            await asyncio.sleep(self.prefill_s)
            cached_tokens, computed_ns = await self._compute(request)
            if self.late_failures:
                await abort(context, self.late_failures.pop(0), "")
            if self.encoder is not None:  # has read the embeddings
                self.encoder.held -= {image.handle.handle_id for image in request.images}
            token = answer_token(request.sampling.seed, request.emitted_count, self.answer)
            self.drawn_s.append(time.monotonic())
            yield prefill_pb2.PrefillResponse(
                first_token=prefill_pb2.FirstToken(
                    token_id=END if self.first_token_ends else token,
                    logprob=-0.5,
                    finish_reason=common_pb2.FINISH_REASON_STOP if self.first_token_ends else None,
                    cached_tokens=cached_tokens,
                    timings=[common_pb2.StageTiming(stage="prefill", duration_ns=computed_ns)],
                    service_ns=self.service_ns,
                )
            )
            if self.after_first_token is not None:
                await self.after_first_token()
            if self.first_token_ends:
                return
            if self.seals:
                self.fabric.sealed(request.transfer_id).set()
            await asyncio.sleep(self.hold_open_s)
            yield prefill_pb2.PrefillResponse(pushed=prefill_pb2.Pushed(byte_count=1))

    async def _compute(self, request: Any) -> tuple[int, int]:
        """Takes the time of what is not cached, one prompt after the other."""
        if not self.token_s:
            return 3, 1000
        hashes = block_hashes(request.token_ids, request.images, self.info.kv_layout.block_size)
        async with self.engine:
            held = 0
            while held < len(hashes) and hashes[held] in self.cache:
                held += 1
            cached = min(held * self.info.kv_layout.block_size, len(request.token_ids) - 1)
            computed_s = self.token_s * (len(request.token_ids) - cached)
            await asyncio.sleep(computed_s)
            self.cache.update(hashes)
        return cached, int(computed_s * 1e9)


class FakeDecode(FakeWorker, decode_pb2_grpc.DecodeServiceServicer):
    """Waits for the seal, then streams the rest of the answer, ``token_s`` apart."""

    role = worker_pb2.WORKER_ROLE_DECODE

    def __init__(self, fabric: Fabric | None = None, **info: Any) -> None:
        super().__init__(fabric, **info)
        self.token_s = 0.0
        self.tokens_per_message = 1
        #: Position in the answer at which the process dies, or preempts.
        self.die_at: int | None = None
        self.preempt_at: int | None = None
        #: Tokens that come just before the death.
        self.last_words: list[int] = []
        #: Started is sent last, as if it and all tokens came in one piece.
        self.started_late = False
        self.emitted = 0
        #: Runs before the wait for the seal.
        self.before: Callable[[], Awaitable[None]] | None = None

    def add_service(self) -> None:
        decode_pb2_grpc.add_DecodeServiceServicer_to_server(self, self.server)

    async def Decode(self, request: Any, context: Any) -> AsyncIterator[Any]:
        async with self.call("Decode", request, context):
            if self.before is not None:
                await self.before()
            position = request.emitted_count
            if request.WhichOneof("source") == "transfer_id":
                await self.fabric.sealed(request.transfer_id).wait()
                position += 1
            usage = common_pb2.Usage(prompt_tokens=7, image_tokens=5)
            started = decode_pb2.DecodeResponse(started=decode_pb2.Started(usage=usage))
            if not self.started_late:
                yield started
            started_ns = time.monotonic_ns()
            while position < request.sampling.max_tokens:
                await asyncio.sleep(self.token_s)
                if self.die_at is not None and position >= self.die_at:
                    self.die_at = None
                    if self.last_words:
                        yield _tokens(self.last_words)
                    await context.abort(grpc.StatusCode.UNAVAILABLE, "gone")
                if self.preempt_at is not None and position >= self.preempt_at:
                    self.preempt_at = None
                    yield decode_pb2.DecodeResponse(preempted=decode_pb2.Preempted())
                    return
                end = min(position + self.tokens_per_message, request.sampling.max_tokens)
                tokens = [
                    answer_token(request.sampling.seed, i, self.answer)
                    for i in range(position, end)
                ]
                self.emitted += len(tokens)
                yield _tokens(tokens)
                position = end
            if self.started_late:
                yield started
            yield decode_pb2.DecodeResponse(
                finished=decode_pb2.Finished(
                    finish_reason=common_pb2.FINISH_REASON_LENGTH,
                    timings=[
                        common_pb2.StageTiming(
                            stage="decode", duration_ns=time.monotonic_ns() - started_ns
                        )
                    ],
                    usage=usage,
                )
            )


def _tokens(token_ids: list[int]) -> decode_pb2.DecodeResponse:
    return decode_pb2.DecodeResponse(
        tokens=decode_pb2.Tokens(token_ids=token_ids, logprobs=[-0.5] * len(token_ids))
    )
