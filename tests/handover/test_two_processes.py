"""Decode in this process, prefill in another, NIXL between them."""

import asyncio
import dataclasses
import json
import os
import sys
from pathlib import Path

import pytest

from epd.errors import TransferFailedError, UnavailableError
from epd.handover.lease_config import LeaseConfig
from epd.transfer.base import AgentDescriptor
from tests.handover.sides import SEAL_BYTES, Decode, eventually

ROOT = Path(__file__).parents[2]


class RemotePrefill:
    """The other process, and the control calls it makes to ``decode``."""

    def __init__(self, decode):
        self.decode = decode

    async def __aenter__(self):
        self.server = await asyncio.start_server(self._answer, "127.0.0.1", 0)
        port = self.server.sockets[0].getsockname()[1]
        self.process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            "tests.handover.prefill_process",
            str(port),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
            limit=1 << 24,
        )
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.commands, self.answers = self.process.stdin, self.process.stdout
        told = await self.answer()
        self.descriptor = AgentDescriptor(**{**told, "metadata": bytes.fromhex(told["metadata"])})
        self.decode.receiver.peer_arrived(self.descriptor)
        mine = self.decode.descriptor
        self.tell({**vars(mine), "metadata": mine.metadata.hex()})
        self.tell([self.decode.memory.address, self.decode.pool.num_blocks])
        return self

    async def __aexit__(self, *_):
        if self.process.returncode is None:
            self.commands.close()
        await asyncio.wait_for(self.process.wait(), 60)
        self.server.close()

    def tell(self, command):
        self.commands.write(json.dumps(command).encode() + b"\n")

    async def answer(self):
        return json.loads(await asyncio.wait_for(self.answers.readline(), 60))

    async def kill(self):
        self.process.kill()
        await self.process.wait()
        self.decode.receiver.peer_gone(self.descriptor.instance_id)  # what the pair stream tells

    async def _answer(self, reader, writer):
        name, *arguments = json.loads(await reader.readline())
        receiver = self.decode.receiver
        try:
            if name == "reserve":
                transfer_id, token_count = arguments
                result = dataclasses.asdict(
                    await receiver.reserve(transfer_id, self.descriptor.instance_id, token_count)
                )
            elif name == "fail":
                transfer_id, message, settled = arguments
                result = receiver.fail(transfer_id, TransferFailedError(message), settled)
            else:
                result = getattr(receiver, name)(*arguments)
            answer: dict[str, object] = {"result": result}
        except Exception as error:
            answer = {"error": str(error)}
        writer.write(json.dumps(answer).encode() + b"\n")
        writer.close()


@pytest.fixture
async def decode():
    side = await asyncio.to_thread(
        Decode, "nixl", None, 64, LeaseConfig(progress_timeout_s=60, hold_s=1.0)
    )
    running = asyncio.create_task(side.receiver.run())
    yield side
    running.cancel()
    await asyncio.to_thread(side.agent.stop)


async def test_bytes_are_equal_and_counted_by_nixl(decode):
    async with RemotePrefill(decode) as prefill:
        counted = 0
        for number, token_count in enumerate((100, 7, 256)):
            transfer_id = f"t{number}"
            prefill.tell({"transfer_id": transfer_id, "token_count": token_count, "chunk": 48})
            sealed = await decode.receiver.wait_sealed(transfer_id, 60)
            blocks = decode.receiver.take(transfer_id)
            answer = await prefill.answer()
            assert decode.content(blocks).hex() == answer["content"]
            kv_bytes = len(blocks) * decode.layout.block_bytes * decode.layout.layer_count
            assert answer["bytes"] == sealed.byte_count + SEAL_BYTES == kv_bytes + SEAL_BYTES
            counted += answer["bytes"]
            assert answer["counted"] == counted
            decode.pool.free(blocks)
        await eventually(lambda: decode.pool.num_free == decode.pool.num_blocks)
        decode.check()


async def test_prefill_killed_in_the_middle_of_a_write_costs_only_its_requests(decode):
    """F18, F16: the others live, its blocks wait for the hold time, a new process is a new peer."""
    async with RemotePrefill(decode) as doomed, RemotePrefill(decode) as living:
        waiting = asyncio.create_task(decode.receiver.wait_sealed("a", 60))
        doomed.tell({"transfer_id": "a", "token_count": 256, "pause_s": 0.5, "delay": {"1": 30}})
        await eventually(lambda: decode.pool.num_used)
        await asyncio.sleep(0.1)
        await doomed.kill()
        with pytest.raises(UnavailableError, match="was lost"):
            await waiting
        assert decode.pool.num_quarantined == 16
        living.tell({"transfer_id": "b", "token_count": 100})
        await decode.receiver.wait_sealed("b", 60)
        decode.pool.free(decode.receiver.take("b"))
        await eventually(lambda: decode.pool.num_quarantined == 0)
        async with RemotePrefill(decode) as again:
            again.tell({"transfer_id": "c", "token_count": 100})
            await decode.receiver.wait_sealed("c", 60)
            decode.pool.free(decode.receiver.take("c"))
        await eventually(lambda: decode.pool.num_free == decode.pool.num_blocks)
        decode.check()
