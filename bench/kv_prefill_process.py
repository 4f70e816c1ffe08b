"""The sending process of kv_transfer: a raw agent and our sender over the same memory."""

import asyncio
import sys
import time
import uuid
from typing import Any

import grpc

from bench.line_server import serve_lines
from bench.raw_nixl import TIMEOUT_S, RawNixl
from bench.synthetic_kv import SHAPE, SyntheticKv
from epd.engine.requests import LayerProgress
from epd.handover.push import KvPush
from epd.handover.seal import SealSlots
from epd.handover.sender import KvSender
from epd.thread_slices import serve_promptly
from epd.v1 import decode_pb2_grpc
from epd.worker.transfer_endpoint import open_endpoint
from services.prefill.config import PairingConfig
from services.prefill.peer_link import DecodePeer, PairingTerms, PeerLink


class PrefillProcess:
    """Its public coroutines are the commands."""

    def __init__(self, num_blocks: int) -> None:
        self._kv = SyntheticKv(num_blocks)
        slots = SealSlots(64)
        memory = ((self._kv.memory.segment, "DRAM"), (slots.segment, "DRAM"))
        self._agent = open_endpoint(("nixl",), "prefill", uuid.uuid4().hex, memory)
        self._raw = RawNixl("raw-prefill", self._kv.memory.segment, self._agent.config.poll_s)
        self._sender = KvSender(self._agent, self._kv.layout, slots)
        self._tasks: list[asyncio.Task[None]] = []
        self._kv.fill(0)

    async def meet(self, port: int, raw: str) -> dict[str, Any]:
        """Pairs with the receiving side; how to reach the raw agent of this one."""
        address = f"127.0.0.1:{port}"
        stub = decode_pb2_grpc.DecodeServiceStub(grpc.aio.insecure_channel(address))
        config = PairingConfig(decodes=(address,), pair_silence_s=TIMEOUT_S)
        mine = await asyncio.to_thread(self._agent.descriptors)
        terms = PairingTerms(mine, self._kv.layout, config)
        link = PeerLink(address, stub, terms, self._join, self._leave)
        self._tasks.append(asyncio.create_task(link.run()))
        self._target = (await link.wait_up(TIMEOUT_S)).target
        self._raw_peer = self._raw.connect(bytes.fromhex(raw))
        return {"raw": self._raw.metadata().hex()}

    async def _join(self, peer: DecodePeer) -> None:
        await asyncio.wrap_future(self._agent.connect(peer.target.agent))
        self._sender.peer_arrived(peer.target)

    async def _leave(self, peer: DecodePeer) -> None:
        self._sender.peer_gone(peer.target)

    async def choose(self, seed: int, count: int) -> list[int]:
        """The blocks that this seed gives."""
        return self._kv.choose(seed, count)

    async def write_raw(self, local: list[int], remote: list[int], notice: str) -> int:
        """One WRITE of everything; when it began."""
        layouts = (self._kv.layout, self._target.layout)
        return await asyncio.to_thread(
            self._raw.write, self._raw_peer, layouts, (local, remote), notice.encode()
        )

    async def push(self, local: list[int], transfer_id: str) -> int:
        """A whole push of ours, all layers at once as if computed in no time; when it began.

        Reserve comes before that, as in a prefill worker it does before the forward pass.
        """
        token_count = len(local) * SHAPE.block_size
        async with self._sender.push(transfer_id, transfer_id, self._target, token_count) as push:
            started_ns = await asyncio.to_thread(self._write_layers, push, local, token_count)
            await self._sender.finish(push, 1, 0.0, time.monotonic_ns())
        return started_ns

    def _write_layers(self, push: KvPush, local: list[int], token_count: int) -> int:
        """What the engine thread does; when it began."""
        started_ns = time.monotonic_ns()
        progress = LayerProgress(push.request_id, tuple(local), 0, token_count, token_count, 0)
        for layer in range(SHAPE.layer_count):
            self._sender.on_layer(layer, (progress,))
        return started_ns

    async def checksum(self, blocks: list[int]) -> int:
        """Of some blocks."""
        return self._kv.checksum(blocks)

    async def serve(self) -> None:
        """Answers until stdin ends."""
        self._tasks.append(asyncio.create_task(self._sender.run()))
        commands = (self.meet, self.choose, self.write_raw, self.push, self.checksum)
        await serve_lines({command.__name__: command for command in commands})
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await asyncio.to_thread(self._agent.stop)


async def main(num_blocks: int) -> None:
    """Makes the pool and serves."""
    serve_promptly()  # as services do
    await PrefillProcess(num_blocks).serve()


if __name__ == "__main__":
    asyncio.run(main(int(sys.argv[1])))
