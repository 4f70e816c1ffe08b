"""One tensor-parallel rank in a process of its own. Arguments: heads, planes, degree, rank."""

import asyncio
import sys

import numpy as np

from bench.line_server import serve_lines
from epd.handover.block_runs import KvRoute, block_runs, block_slices
from epd.handover.layer_digests import LayerDigests, differing_layers, reader_of_slices
from epd.transfer.base import AgentDescriptor
from epd.transfer.buffer import HostBuffer
from tests.handover.ranks import at, kv_of, of_rank, shape_of
from tests.transfer.peers import open_agent

NUM_BLOCKS = 16


class Rank:
    """Its pool and its agent."""

    def __init__(self, heads, planes, degree, rank):
        shape = of_rank(shape_of(heads, planes), degree, rank)
        self.memory = HostBuffer(shape.layer_count * NUM_BLOCKS * shape.block_bytes)
        self.layout = at(shape, self.memory.address, NUM_BLOCKS)
        self.agent = open_agent("nixl", f"rank{rank}of{degree}")
        self.agent.register(self.memory.segment)
        self.descriptor = self.agent.descriptor()
        self.arrived: list[tuple[str, bytes]] = []
        self.agent.subscribe(self.arrived.extend)

    def blocks(self):
        rows = self.memory.view().view(np.float32)
        return rows.reshape(self.layout.layer_count, NUM_BLOCKS, -1)

    async def hello(self):
        known = {**vars(self.descriptor), "metadata": self.descriptor.metadata.hex()}
        return {"agent": known, "address": self.memory.address}

    async def write(self, reader, degree, rank, local, remote):
        """Fills blocks ``local`` with the KV and pushes them to a reader's blocks ``remote``."""
        agent = reader["agent"]
        descriptor = AgentDescriptor(**{**agent, "metadata": bytes.fromhex(agent["metadata"])})
        shape = shape_of(self.layout.kv_head_count, self.layout.planes)
        target = at(of_rank(shape, degree, rank), reader["address"], NUM_BLOCKS)
        kv = kv_of(self.layout, len(local))
        self.blocks()[:, local] = kv.reshape(self.layout.layer_count, len(local), -1)
        await asyncio.wrap_future(self.agent.connect(descriptor))
        shared = reader_of_slices(self.read_block, block_slices(self.layout, target), written=True)
        digests = LayerDigests(self.layout.layer_count, shared)
        moved = descriptors = 0
        route, runs = KvRoute(self.layout, target), block_runs(local, remote)
        for layer in range(self.layout.layer_count):
            mine, theirs = route.segments(runs, range(layer, layer + 1))
            if not len(mine):
                continue
            done = await asyncio.wrap_future(
                self.agent.write(descriptor.agent_name, mine, theirs, b"layer")
            )
            digests.update(layer, local)
            moved += done.byte_count
            descriptors += done.descriptor_count
        sums = [one.hex() for one in digests.digests()]
        return {"bytes": moved, "descriptors": descriptors, "digests": sums}

    async def read(self, notices, blocks):
        """The blocks, once so many WRITEs have arrived; and whether nothing else was touched."""
        async with asyncio.timeout(60):
            while len(self.arrived) < notices:
                await asyncio.sleep(0.005)
        others = np.delete(self.blocks(), blocks, axis=1)
        return {
            "kv": self.blocks()[:, blocks].tobytes().hex(),
            "others_clean": not others.any(),
            "notices": len(self.arrived),
        }

    async def differing(self, degree, rank, digests, blocks, spoil):
        """Layers whose bytes are not those of a writer's digests: as they have arrived, and with
        byte ``spoil`` of the first block changed in every layer.
        """
        shape = shape_of(self.layout.kv_head_count, self.layout.planes)
        slices = block_slices(of_rank(shape, degree, rank), self.layout)
        shared = reader_of_slices(self.read_block, slices, written=False)
        sums = [bytes.fromhex(one) for one in digests]
        arrived = differing_layers(sums, blocks, shared)
        held = self.blocks().view(np.uint8)
        held[:, blocks[0], spoil] ^= 1
        spoilt = differing_layers(sums, blocks, shared)
        held[:, blocks[0], spoil] ^= 1
        return {"arrived": arrived, "spoilt": spoilt}

    def read_block(self, layer, block):
        return self.blocks()[layer, block].tobytes()


async def main(arguments):
    rank = await asyncio.to_thread(Rank, *arguments)
    calls = {name: getattr(rank, name) for name in ("hello", "write", "read", "differing")}
    await serve_lines(calls)
    rank.agent.stop()


if __name__ == "__main__":
    asyncio.run(main([int(one) for one in sys.argv[1:]]))
