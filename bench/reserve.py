"""Reserve and the first post, as a prefill worker does them, on a decode worker under load."""

import asyncio
import contextlib
import random
import tempfile
import time
import uuid
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import grpc

from epd.engine.kv_layout import KvLayout, KvRegion
from epd.engine.requests import LayerProgress
from epd.fleet.fleet import Fleet
from epd.fleet.plan import FleetPlan
from epd.handover.control import PushTarget
from epd.handover.seal import SealSlots
from epd.handover.sender import KvSender
from epd.transfer.buffer import HostBuffer
from epd.v1 import common_pb2, decode_pb2, decode_pb2_grpc, worker_pb2, worker_pb2_grpc
from epd.wire.kv_layout import layout_from_proto
from epd.worker.transfer_endpoint import open_endpoint
from services.prefill.config import PairingConfig
from services.prefill.peer_link import DecodePeer, PairingTerms, PeerLink

PROMPT_TOKENS = 256
LOAD_PROMPT_TOKENS = 32


class ReservingPeer:
    """A paired prefill worker without an engine: its KV is whatever lies in its memory."""

    def __init__(self, layout: KvLayout) -> None:
        blocks = layout.blocks_for(PROMPT_TOKENS)
        self._memory = HostBuffer(layout.layer_count * blocks * layout.block_bytes)
        region = KvRegion(
            first_layer=0,
            layer_count=layout.layer_count,
            address=self._memory.address,
            length=self._memory.segment.length,
            device_id=0,
            layer_stride=blocks * layout.block_bytes,
            block_stride=layout.block_bytes,
        )
        self._layout = replace(layout, regions=(region,))
        self._blocks = tuple(range(blocks))
        slots = SealSlots(128)
        memory = ((self._memory.segment, "DRAM"), (slots.segment, "DRAM"))
        self._agent = open_endpoint(("nixl",), "prefill", uuid.uuid4().hex, memory)
        self.sender = KvSender(self._agent, self._layout, slots)
        self._target: PushTarget | None = None

    @contextlib.asynccontextmanager
    async def paired(self, address: str) -> AsyncIterator[None]:
        """Paired with a decode worker until left."""
        descriptors = await asyncio.to_thread(self._agent.descriptors)
        async with grpc.aio.insecure_channel(address) as channel:
            terms = PairingTerms(descriptors, self._layout, PairingConfig(decodes=(address,)))
            stub = decode_pb2_grpc.DecodeServiceStub(channel)
            link = PeerLink(address, stub, terms, self._join, self._leave)
            tasks = [asyncio.create_task(run) for run in (link.run(), self.sender.run())]
            self._target = (await link.wait_up(30.0)).target
            try:
                yield
            finally:
                await self.sender.close(5.0)
                for task in tasks:
                    task.cancel()
                await asyncio.gather(*tasks, return_exceptions=True)
                await asyncio.to_thread(self._agent.stop)

    async def reserve(self, hold: asyncio.Event | None = None) -> float:
        """Milliseconds from asking for memory until the first layer's WRITE is posted.

        Keeps the reservation until ``hold`` is set, then gives the transfer up.
        """
        assert self._target is not None
        name, started_ns = uuid.uuid4().hex, time.monotonic_ns()
        try:
            async with self.sender.push(name, name, self._target, PROMPT_TOKENS) as push:
                progress = LayerProgress(name, self._blocks, 0, PROMPT_TOKENS, PROMPT_TOKENS, 0)
                push.write_layer(0, progress)
                await push.writes.drained()
                took_ms = (push.writes.first_posted_ns - started_ns) / 1e6
                if hold is not None:
                    await hold.wait()
                raise _GivenUpError
        except _GivenUpError:
            return took_ms

    async def _join(self, peer: DecodePeer) -> None:
        await asyncio.wrap_future(self._agent.connect(peer.target.agent))
        self.sender.peer_arrived(peer.target)

    async def _leave(self, peer: DecodePeer) -> None:
        self.sender.peer_gone(peer.target)


class _GivenUpError(Exception):
    """The push is left on purpose."""


def measure_reserve(folder: Path, samples: int, streams: int, threads: int) -> list[float]:
    """Milliseconds of ``samples`` reservations, one after another, while ``streams`` requests are
    being decoded.
    """
    flags = ("--prefix-cache=false", "--kv-bytes=268435456", f"--threads={threads}")
    plan = FleetPlan(
        folder,
        encoders=0,
        prefills=0,
        decodes=0,
        unified=1,
        flags={"decode": flags},
        environment={"OMP_NUM_THREADS": str(threads)},
    )
    with tempfile.TemporaryDirectory(prefix="epd-bench-") as logs:
        fleet = Fleet(plan, Path(logs))
        fleet.start()
        try:
            return asyncio.run(_measure(fleet.processes["unified-0"].address, samples, streams))
        finally:
            fleet.stop()


async def _measure(address: str, samples: int, streams: int) -> list[float]:
    async with grpc.aio.insecure_channel(address) as channel:
        info = await worker_pb2_grpc.WorkerServiceStub(channel).GetInfo(worker_pb2.GetInfoRequest())
        peer = ReservingPeer(layout_from_proto(info.kv_layout))
        stub = decode_pb2_grpc.DecodeServiceStub(channel)
        running = [asyncio.Event() for _ in range(streams)]
        load = [
            asyncio.create_task(_decode_for_ever(stub, number, begun))
            for number, begun in enumerate(running)
        ]
        try:
            async with peer.paired(address):
                await asyncio.gather(*(begun.wait() for begun in running))
                await peer.reserve()  # unmeasured: the connection's first use
                found = []
                for _ in range(samples):
                    found.append(await peer.reserve())
                    await asyncio.sleep(0.02)  # at any point of a decode step
                return found
        finally:
            for task in load:
                task.cancel()
            await asyncio.gather(*load, return_exceptions=True)


async def _decode_for_ever(
    stub: decode_pb2_grpc.DecodeServiceStub, number: int, begun: asyncio.Event
) -> None:
    """Keeps one sequence in the worker's running batch."""
    chance = random.Random(number)
    while True:
        request = decode_pb2.DecodeRequest(
            request_id=uuid.uuid4().hex,
            token_ids=[chance.randrange(100) for _ in range(LOAD_PROMPT_TOKENS)],
            sampling=common_pb2.SamplingParams(max_tokens=400, ignore_eos=True),
            local=decode_pb2.LocalPrefill(),
        )
        async for _ in stub.Decode(request):
            begun.set()
