"""The sending process of kv_transfer: a raw agent and our sender over the same memory."""

import asyncio
import contextlib
import sys
import time
import uuid
from typing import Any

import grpc

from bench.line_server import serve_lines
from bench.raw_nixl import RawNixl
from bench.synthetic_kv import SHAPE, SyntheticKv
from epd.engine.requests import LayerProgress
from epd.handover.control import PushTarget
from epd.handover.push import KvPush
from epd.handover.seal import SealSlots
from epd.handover.sender import KvSender
from epd.thread_slices import serve_promptly
from epd.v1 import common_pb2, decode_pb2_grpc
from epd.wire.kv_layout import layout_from_proto
from epd.wire.transfer import agent_from_proto, agent_to_proto
from epd.worker.transfer_endpoint import open_endpoint
from services.prefill.decode_control import GrpcDecodeControl


class PrefillProcess:
    """Its public coroutines are the commands."""

    def __init__(self, num_blocks: int) -> None:
        self._kv = SyntheticKv(num_blocks)
        slots = SealSlots(64)
        memory = ((self._kv.memory.segment, "DRAM"), (slots.segment, "DRAM"))
        self._agent = open_endpoint(("nixl",), "prefill", uuid.uuid4().hex, memory)
        self._raw = RawNixl("raw-prefill", self._kv.memory.segment, self._agent.config.poll_s)
        self._sender = KvSender(self._agent, self._kv.layout, slots)
        self._kv.fill(0)

    async def meet(self, port: int, agent: str, layout: str, raw: str) -> dict[str, Any]:
        """Connects to the receiving side; how to reach this one."""
        peer = agent_from_proto(common_pb2.AgentDescriptor.FromString(bytes.fromhex(agent)))
        there = layout_from_proto(common_pb2.KvLayout.FromString(bytes.fromhex(layout)))
        mine = await asyncio.to_thread(self._agent.descriptor)
        stub = decode_pb2_grpc.DecodeServiceStub(grpc.aio.insecure_channel(f"127.0.0.1:{port}"))
        control = GrpcDecodeControl(
            stub, mine.instance_id, reserve_timeout_s=10.0, control_timeout_s=5.0
        )
        self._target = PushTarget(peer, there, control)
        await asyncio.wrap_future(self._agent.connect(peer))
        self._sender.peer_arrived(self._target)
        self._raw_peer = self._raw.connect(bytes.fromhex(raw))
        return {
            "agent": agent_to_proto(mine).SerializeToString().hex(),
            "raw": self._raw.metadata().hex(),
        }

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
        running = asyncio.create_task(self._sender.run())
        commands = (self.meet, self.choose, self.write_raw, self.push, self.checksum)
        await serve_lines({command.__name__: command for command in commands})
        running.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await running
        await asyncio.to_thread(self._agent.stop)


async def main(num_blocks: int) -> None:
    """Makes the pool and serves."""
    serve_promptly()  # as services do
    await PrefillProcess(num_blocks).serve()


if __name__ == "__main__":
    asyncio.run(main(int(sys.argv[1])))
