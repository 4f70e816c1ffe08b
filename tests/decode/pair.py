"""A prefill and a decode engine in one process with a real hand-over between them, and no gRPC."""

import asyncio
import contextlib
import dataclasses
import time
import uuid
from collections.abc import AsyncIterator
from contextlib import aclosing, asynccontextmanager
from pathlib import Path
from typing import Any

from opentelemetry.trace import NoOpTracer

from epd.engine.async_engine import AsyncEngine
from epd.engine.build import build_engine
from epd.engine.engine import Engine
from epd.engine.requests import EngineRequest, Failed, PrefillDone, RequestMode, SamplingParams
from epd.errors import EpdError
from epd.handover.control import PushTarget
from epd.handover.lease_config import LeaseConfig
from epd.handover.receiver import KvReceiver
from epd.handover.receiver_config import ReceiverConfig
from epd.handover.seal import SealSlots
from epd.handover.sender import KvSender
from epd.handover.sender_config import SenderConfig
from epd.handover.verifier import KvVerifier
from epd.transfer.base import TransferBackend
from epd.transfer.faults import Faults
from epd.transfer.local_backend import LocalFabric
from epd.v1 import decode_pb2
from epd.worker.language_engine import kv_memory
from services.decode.remote import RemoteDecoding
from services.decode.request import DecodeJob
from tests.engine.harness import SMALL
from tests.handover.sides import DirectControl, eventually
from tests.transfer.held import HeldBackend
from tests.transfer.peers import open_agent


class _Worker:
    def __init__(
        self, folder: Path, name: str, fabric: LocalFabric, digests: bool, hook: Any = None
    ) -> None:
        config = dataclasses.replace(SMALL, prefix_cache=False)
        self.engine: Engine = build_engine(folder, config, "digest", hook)
        self.stream = AsyncEngine(self.engine)
        self.layout = self.engine.kv_cache.layout
        self.slots = SealSlots(16, self.layout.layer_count if digests else 0)
        self.faults = Faults()

        def faulty(inner: TransferBackend) -> HeldBackend:
            self.backend = HeldBackend(inner, self.faults)
            return self.backend

        self.agent = open_agent("local", name, fabric, None, faulty)
        for segment, kind in [*kv_memory(self.engine), (self.slots.segment, "DRAM")]:
            self.agent.register(segment, kind)
        self.descriptor = self.agent.descriptor()


@dataclasses.dataclass
class Asked:
    """One request through both workers: the calls, and the tokens decode has sent."""

    prefill: asyncio.Task[int]
    decode: asyncio.Task[None]
    tokens: list[int]


class EnginePair:
    """WRITEs go wrong as ``faults`` says."""

    def __init__(self, folder: Path, early_start: bool, checksum: bool) -> None:
        fabric = LocalFabric()
        self.sender: KvSender
        self._first = _Worker(
            folder, "prefill", fabric, True, lambda *layer: self.sender.on_layer(*layer)
        )
        self._second = _Worker(folder, "decode", fabric, checksum)
        self.faults = self._first.faults
        self.engine = self._second.engine
        self.sender = KvSender(
            self._first.agent,
            self._first.layout,
            self._first.slots,
            SenderConfig(renew_interval_s=0.1),
            self._first.engine.kv_cache.read_block,
        )
        self.receiver = KvReceiver(
            self.engine.pool,
            self._second.layout,
            self._second.agent,
            self._second.slots,
            ReceiverConfig(
                leases=LeaseConfig(progress_timeout_s=60, settle_grace_s=60),
                early_start=early_start,
            ),
            verifier=KvVerifier(self.engine.kv_cache.read_block) if checksum else None,
        )
        self.remote = RemoteDecoding(
            self._second.stream,
            self.receiver,
            NoOpTracer(),
            kv_wait_s=60.0,
            max_buffered_tokens=4096,
            early_start=early_start,
        )
        self.control = DirectControl(self.receiver, self._first.descriptor.instance_id)
        self._target = PushTarget(self._second.descriptor, self._second.layout, self.control)

    def ask(self, prompt: list[int], sampling: SamplingParams) -> Asked:
        """Begins a request on both sides, as the router does."""
        transfer_id = uuid.uuid4().hex
        tokens: list[int] = []

        async def emit(event: decode_pb2.DecodeResponse) -> None:
            tokens.extend(event.tokens.token_ids)

        job = DecodeJob(transfer_id, tuple(prompt), 0, sampling, 0, (), transfer_id, None)
        return Asked(
            asyncio.create_task(self._prefill(transfer_id, prompt, sampling)),
            asyncio.create_task(self.remote.run(job, transfer_id, emit)),
            tokens,
        )

    async def early_step(self) -> None:
        """Waits until decode is in a step on KV that still arrives, or has drawn its token."""
        await eventually(lambda: self.engine._core._early_steps)

    def let_go(self) -> None:
        """Ends what ``HELD`` holds up."""
        self._first.backend.let_go()

    async def idle(self) -> None:
        """Waits until both workers hold nothing, and looks at the books."""
        pools = self.engine.pool, self._first.engine.pool
        await eventually(
            lambda: (
                all(pool.num_used == pool.num_quarantined == 0 for pool in pools)
                and self._second.slots.free_count == self._second.slots.count
            )
        )
        self.receiver.leases.check_integrity()
        assert self.engine.stats().running_requests == self.engine.stats().waiting_requests == 0

    async def _prefill(self, name: str, prompt: list[int], sampling: SamplingParams) -> int:
        """Returns the first token."""
        blocks = self._first.layout.blocks_for(len(prompt))
        assert blocks
        request = EngineRequest(name, prompt, sampling, RequestMode.PREFILL_ONLY)
        async with self.sender.push(
            name,
            name,
            self._target,
            len(prompt),
            release=lambda: self._first.engine.release(name),
        ) as push:
            async with aclosing(self._first.stream.generate(request)) as events:
                async for event in events:
                    if isinstance(event, Failed):
                        raise event.error
                    if isinstance(event, PrefillDone):
                        done = event
            await self.sender.finish(push, done.token_id, done.logprob, time.monotonic_ns())
            return done.token_id

    @asynccontextmanager
    async def running(self) -> AsyncIterator["EnginePair"]:
        """With all threads and background tasks."""
        for worker in (self._first, self._second):
            worker.stream.start()
        await asyncio.wrap_future(self._first.agent.connect(self._second.descriptor))
        self.receiver.peer_arrived(self._first.descriptor)
        self.sender.peer_arrived(self._target)
        upkeep = [asyncio.create_task(one.run()) for one in (self.receiver, self.sender)]
        try:
            yield self
        finally:
            for task in upkeep:
                task.cancel()
            await asyncio.wait(upkeep)
            for worker in (self._first, self._second):
                assert await worker.stream.stop()
                await asyncio.to_thread(worker.agent.stop)


@asynccontextmanager
async def engine_pair(
    folder: Path,
    *,
    early_start: bool = True,
    checksum: bool = False,
) -> AsyncIterator[EnginePair]:
    """A pair whose decode engine takes its steps for so long that any wait is shorter."""
    pair = EnginePair(folder, early_start, checksum)
    for _ in range(2):
        pair.engine._core._scheduler.chunk_limit.observe(1, 0, 50.0)
    async with pair.running():
        yield pair


async def outcome(asked: Asked) -> EpdError | None:
    """How decode's part ended; prefill's own failure says nothing more."""
    with contextlib.suppress(EpdError):
        await asked.prefill
    try:
        await asked.decode
    except EpdError as error:
        return error
    return None
