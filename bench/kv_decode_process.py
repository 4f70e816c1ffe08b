"""The receiving process of kv_transfer: a raw agent and our receiver over the same memory."""

import asyncio
import contextlib
import sys
import threading
import time
import uuid
from typing import Any

import grpc

from bench.line_server import serve_lines
from bench.raw_nixl import TIMEOUT_S, RawNixl
from bench.synthetic_kv import SyntheticKv
from epd.handover.lease_config import LeaseConfig
from epd.handover.receiver import KvReceiver
from epd.handover.receiver_config import ReceiverConfig
from epd.handover.seal import SealSlots
from epd.rpc.server_calls import ServerCalls
from epd.telemetry.setup import start_telemetry
from epd.thread_slices import serve_promptly
from epd.transfer.base import AgentDescriptor
from epd.v1 import decode_pb2_grpc
from epd.worker.transfer_endpoint import open_endpoint
from services.decode.pairing import Pairings, PairingTerms
from services.decode.reserving import Reserving
from services.decode.servicer import DecodeServicer


class DecodeProcess:
    """Its public coroutines are the commands."""

    def __init__(self, num_blocks: int) -> None:
        self._kv = SyntheticKv(num_blocks)
        slots = SealSlots(64)
        memory = ((self._kv.memory.segment, "DRAM"), (slots.segment, "DRAM"))
        self._agent = open_endpoint(("nixl",), "decode", uuid.uuid4().hex, memory)
        self._raw = RawNixl("raw-decode", self._kv.memory.segment, self._agent.config.poll_s)
        config = ReceiverConfig(leases=LeaseConfig(peer_share=1.0))
        self._receiver = KvReceiver(self._kv.pool, self._kv.layout, self._agent, slots, config)
        self._server = grpc.aio.server()

    async def hello(self) -> dict[str, Any]:
        """How to reach this side."""
        descriptors = await asyncio.to_thread(self._agent.descriptors)
        calls = ServerCalls(start_telemetry("decode", uuid.uuid4().hex), starts_traces=False)
        pairings = Pairings(
            PairingTerms(descriptors, self._kv.layout, 0.25, TIMEOUT_S, 64),
            self._join,
            self._leave,
            Reserving(self._receiver, calls).answer,
        )
        # Only the calls that concern transfers are made here.
        servicer = DecodeServicer(pairings, self._receiver, None, None)  # type: ignore[arg-type]
        decode_pb2_grpc.add_DecodeServiceServicer_to_server(servicer, self._server)
        port = self._server.add_insecure_port("127.0.0.1:0")
        await self._server.start()
        return {"port": port, "raw": self._raw.metadata().hex()}

    async def meet(self, raw: str) -> None:
        """Knows the sending side's raw agent from here on."""
        self._raw.connect(bytes.fromhex(raw))

    async def _join(self, peer: AgentDescriptor) -> None:
        await asyncio.wrap_future(self._agent.connect(peer))
        self._receiver.peer_arrived(peer)

    async def _leave(self, peer: AgentDescriptor) -> None:
        self._receiver.peer_gone(peer.instance_id)

    async def choose(self, seed: int, count: int) -> list[int]:
        """The blocks that this seed gives."""
        return self._kv.choose(seed, count)

    async def await_raw(self, notice: str) -> int:
        """Waits for a raw WRITE's notice; when it was seen."""
        return await asyncio.to_thread(self._raw.wait_notice, notice.encode())

    async def await_sealed(self, transfer_id: str) -> int:
        """Waits for a push of ours until its KV could be decoded from; when that was."""
        await self._receiver.wait_sealed(transfer_id, TIMEOUT_S)
        ended_ns = time.monotonic_ns()
        self._kv.pool.free(self._receiver.take(transfer_id))
        return ended_ns

    async def idle_share(self, seconds: float) -> float:
        """The share of a core that the transfer agent's thread takes while nothing is due."""
        (thread,) = (one for one in threading.enumerate() if one.name == "transfer-agent")
        assert thread.ident is not None
        clock = time.pthread_getcpuclockid(thread.ident)
        began_s, used_s = time.monotonic(), time.clock_gettime(clock)
        await asyncio.sleep(seconds)
        return (time.clock_gettime(clock) - used_s) / (time.monotonic() - began_s)

    async def checksum(self, blocks: list[int]) -> int:
        """Of some blocks."""
        return self._kv.checksum(blocks)

    async def serve(self) -> None:
        """Answers until stdin ends."""
        running = asyncio.create_task(self._receiver.run())
        commands = (
            self.hello,
            self.meet,
            self.choose,
            self.await_raw,
            self.await_sealed,
            self.idle_share,
            self.checksum,
        )
        await serve_lines({command.__name__: command for command in commands})
        running.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await running
        await self._server.stop(0)
        await asyncio.to_thread(self._agent.stop)


async def main(num_blocks: int) -> None:
    """Makes the pool and serves."""
    serve_promptly()  # as services do
    await DecodeProcess(num_blocks).serve()


if __name__ == "__main__":
    asyncio.run(main(int(sys.argv[1])))
