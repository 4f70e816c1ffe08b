"""A prefill side in a process of its own; control calls come back to the test over a socket."""

import asyncio
import json
import sys

from epd.errors import TransferFailedError, UnavailableError
from epd.handover.control import PushTarget, Reservation
from epd.transfer.base import AgentDescriptor, Segment
from tests.handover.sides import Prefill


class SocketControl:
    """One JSON line per call and per answer."""

    def __init__(self, port):
        self._port = port

    async def _call(self, name, *arguments):
        try:
            reader, writer = await asyncio.open_connection("127.0.0.1", self._port)
            writer.write(json.dumps([name, *arguments]).encode() + b"\n")
            answer = json.loads(await reader.readline())
            writer.close()
        except (OSError, ValueError) as error:
            raise UnavailableError(str(error)) from error
        if "error" in answer:
            raise TransferFailedError(answer["error"])
        return answer["result"]

    async def reserve(self, transfer_id, token_count, block_hashes):
        told = await self._call("reserve", transfer_id, token_count)
        told["block_ids"] = tuple(told["block_ids"])
        told["seal"] = Segment(**told["seal"])
        return Reservation(**told)

    async def announce(self, transfer_id, generation, first_token, writes_per_layer):
        raise AssertionError("this decode side does not follow the layers")

    async def renew(self, transfer_ids):
        return await self._call("renew", list(transfer_ids))

    async def fail(self, transfer_id, error, settled):
        await self._call("fail", transfer_id, error.message, settled)

    async def settle(self, transfer_ids):
        await self._call("settle", list(transfer_ids))


async def main(port):
    side = await asyncio.to_thread(Prefill, "nixl", None, 64)
    mine = {**vars(side.descriptor), "metadata": side.descriptor.metadata.hex()}
    print(json.dumps(mine), flush=True)
    theirs = json.loads(await asyncio.to_thread(sys.stdin.readline))
    theirs["metadata"] = bytes.fromhex(theirs["metadata"])
    descriptor = AgentDescriptor(**theirs)
    # Shapes are equal; only where decode's memory lies is its own.
    region = json.loads(await asyncio.to_thread(sys.stdin.readline))
    target = PushTarget(descriptor, side.layout_at(*region), SocketControl(port))
    await asyncio.wrap_future(side.agent.connect(descriptor))
    running = asyncio.create_task(side.sender.run())
    while line := await asyncio.to_thread(sys.stdin.readline):
        command = json.loads(line)
        side.faults.delay = {int(k): v for k, v in command.pop("delay", {}).items()}
        blocks = side.pool.allocate(side.layout.blocks_for(command["token_count"]))
        assert blocks is not None
        side.pool.free(blocks)
        try:
            report = await side.run_request(target=target, **command)
        except TransferFailedError as error:
            print(json.dumps({"error": error.message}), flush=True)
            continue
        answer = {
            "content": side.content(blocks).hex(),
            "bytes": report.byte_count,
            "counted": side.agent.counters.writes.byte_count,
        }
        print(json.dumps(answer), flush=True)
    running.cancel()
    side.agent.stop()


if __name__ == "__main__":
    asyncio.run(main(int(sys.argv[1])))
