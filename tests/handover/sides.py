"""Both sides of a KV hand-over with synthetic pools: no model, no gRPC."""

import asyncio
import contextlib
import dataclasses
import itertools
import time

import numpy as np

from epd.engine.block_pool import BlockPool
from epd.engine.kv_layout import KvLayout, KvRegion
from epd.engine.requests import LayerProgress
from epd.handover.control import PushTarget
from epd.handover.lease_config import LeaseConfig
from epd.handover.receiver import KvReceiver
from epd.handover.receiver_config import ReceiverConfig
from epd.handover.seal import SEAL_BYTES, SealSlots
from epd.handover.sender import KvSender
from epd.handover.sender_config import SenderConfig
from epd.handover.verifier import KvVerifier
from epd.transfer.buffer import HostBuffer
from epd.transfer.faults import Faults
from epd.transfer.transfer_loop import AgentConfig
from tests.transfer.held import HeldBackend
from tests.transfer.peers import open_agent

SHAPE = KvLayout(
    model_digest="m",
    layer_count=4,
    kv_head_count=2,
    head_dim=8,
    dtype="float32",
    block_size=16,
)

#: Ends a test that forgot to open a gate; no test waits for it.
GATE_TIMEOUT_S = 120.0


class Side:
    """A pool of ``num_blocks`` synthetic KV blocks that a transfer agent has registered."""

    def __init__(
        self, transport, name, num_blocks, fabric, shape=SHAPE, agent_config=None, digests=False
    ):
        self.faults = Faults()
        self.pool = BlockPool(num_blocks, shape.block_size)
        self.memory = HostBuffer(shape.layer_count * num_blocks * shape.block_bytes)
        self.layout = self.layout_at(self.memory.address, num_blocks, shape)
        self.slots = SealSlots(64, shape.layer_count if digests else 0)

        def faulty(inner):
            self.backend = HeldBackend(inner, self.faults)
            return self.backend

        self.agent = open_agent(transport, name, fabric, agent_config, faulty)
        self.agent.register(self.memory.segment)
        self.agent.register(self.slots.segment)
        self.descriptor = self.agent.descriptor()

    @staticmethod
    def layout_at(address, num_blocks, shape=SHAPE):
        """The layout of ``num_blocks`` blocks in one region at an address."""
        per_layer = num_blocks * shape.block_bytes
        length = shape.layer_count * per_layer
        region = KvRegion(0, shape.layer_count, address, length, 0, per_layer, shape.block_bytes)
        return dataclasses.replace(shape, regions=(region,))

    def block(self, layer, block):
        """The bytes of a block of a layer."""
        size = self.layout.block_bytes
        return self.memory.view((layer * self.pool.num_blocks + block) * size, size)

    def read_block(self, layer, block):
        return self.block(layer, block).tobytes()

    def content(self, blocks):
        """All layers of some blocks."""
        return b"".join(
            self.block(layer, block).tobytes()
            for layer in range(self.layout.layer_count)
            for block in blocks
        )


class DirectControl:
    """Control calls as plain function calls; can be made to fail."""

    def __init__(self, receiver, sender_instance_id):
        self.receiver = receiver
        self.sender_instance_id = sender_instance_id
        self.error = None
        #: Holds Settles up until it is set.
        self.settle_gate = None
        self.calls = []

    def count(self, name):
        """How many calls of this name there were."""
        return sum(call[1] == name for call in self.calls)

    def _note(self, *call):
        self.calls.append((time.monotonic(), *call))
        if self.error is not None:
            raise self.error

    async def reserve(self, transfer_id, token_count, block_hashes=()):
        self._note("reserve", transfer_id)
        return await self.receiver.reserve(
            transfer_id, self.sender_instance_id, token_count, block_hashes
        )

    async def announce(self, transfer_id, generation, first_token, writes_per_layer):
        self._note("announce", transfer_id, first_token, writes_per_layer)
        self.receiver.announce(transfer_id, generation, first_token, writes_per_layer)

    async def renew(self, transfer_ids):
        self._note("renew", *transfer_ids)
        return self.receiver.renew(transfer_ids)

    async def fail(self, transfer_id, error, settled):
        self._note("fail", transfer_id, error, settled)
        self.receiver.fail(transfer_id, error, settled)

    async def settle(self, transfer_ids):
        self._note("settle", *transfer_ids)
        if self.settle_gate is not None:
            await self.settle_gate.wait()
        self.receiver.settle(transfer_ids)


class Decode(Side):
    """A receiver and its pool."""

    def __init__(self, transport, fabric, num_blocks=64, leases=None, checksum=False, **receiver):
        super().__init__(transport, "decode", num_blocks, fabric, digests=checksum)
        leases = leases or LeaseConfig(progress_timeout_s=60, settle_grace_s=60, hold_s=1.0)
        self.receiver = KvReceiver(
            self.pool,
            self.layout,
            self.agent,
            self.slots,
            ReceiverConfig(leases=leases, **receiver),
            verifier=KvVerifier(self.read_block) if checksum else None,
        )

    def be_impatient(self, **changes):
        """From now on leases end sooner: what has to be there first, has come in peace."""
        leases = self.receiver.leases
        leases._config = dataclasses.replace(leases._config, **changes)

    def check(self):
        self.receiver.leases.check_integrity()


class Prefill(Side):
    """A sender, its pool and a stand-in for the engine that fills blocks with noise."""

    def __init__(self, transport, fabric, num_blocks=64, agent_config=None, **sender):
        super().__init__(
            transport, "prefill", num_blocks, fabric, agent_config=agent_config, digests=True
        )
        self.sender = KvSender(
            self.agent,
            self.layout,
            self.slots,
            SenderConfig(
                **{
                    "renew_interval_s": 0.1,
                    "drain_timeout_s": 5.0,
                    "lost_write_s": 0.2,
                    "merge_bytes": 0,
                    **sender,
                }
            ),
            self.read_block,
        )
        self._noise = np.random.default_rng(7)

    def compute(
        self,
        request_id,
        blocks,
        token_count,
        chunk=64,
        cached=0,
        pause_s=0.0,
        layers=None,
        gates=None,
    ):
        """What the engine thread does for one request: fill blocks, call the hook per layer.

        ``gates`` maps layers to events that they wait for.
        """
        for before in range(cached, token_count, chunk):
            after = min(before + chunk, token_count)
            for layer in itertools.islice(range(self.layout.layer_count), layers):
                first = before // self.layout.block_size
                for block in blocks[first : self.layout.blocks_for(after)]:
                    # A partly filled block changes with every chunk until it is full.
                    self.block(layer, block)[:] = self._noise.integers(
                        0, 256, self.layout.block_bytes, dtype=np.uint8
                    )
                time.sleep(pause_s)
                if gates and layer in gates:
                    gates[layer].wait(GATE_TIMEOUT_S)
                self.sender.on_layer(
                    layer,
                    [LayerProgress(request_id, tuple(blocks), before, after, token_count, cached)],
                )

    async def run_request(self, transfer_id, target, token_count, token=42, hashes=(), **compute):
        """A whole prefill of one request; returns its report."""
        blocks: list[int] = []
        async with self.sender.push(
            transfer_id,
            transfer_id,
            target,
            token_count,
            hashes,
            release=lambda: self.pool.free(blocks),
        ) as push:
            blocks += self.pool.allocate(self.layout.blocks_for(token_count)) or []
            assert blocks
            await asyncio.to_thread(self.compute, transfer_id, blocks, token_count, **compute)
            if push.error is not None:
                raise push.error
            return await self.sender.finish(push, token, -0.5, time.monotonic_ns())


class Pair:
    """Prefill and decode side, paired, with their background tasks running."""

    def __init__(self, prefill, decode):
        self.prefill = prefill
        self.decode = decode
        self.control = DirectControl(decode.receiver, prefill.descriptor.instance_id)
        self.target = PushTarget(decode.descriptor, decode.layout, self.control)

    @contextlib.asynccontextmanager
    async def running(self):
        await asyncio.wrap_future(self.prefill.agent.connect(self.decode.descriptor))
        self.decode.receiver.peer_arrived(self.prefill.descriptor)
        tasks = [
            asyncio.create_task(self.decode.receiver.run()),
            asyncio.create_task(self.prefill.sender.run()),
        ]
        await asyncio.sleep(0)
        try:
            yield self
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks)
            for task in tasks:
                if not task.cancelled():
                    task.result()
            await asyncio.to_thread(self.prefill.agent.stop)
            await asyncio.to_thread(self.decode.agent.stop)

    async def idle(self, timeout_s=60.0):
        """Waits until nothing is held anywhere, then checks the books."""
        decode, prefill = self.decode, self.prefill
        await eventually(
            lambda: (
                decode.pool.num_used == 0
                and decode.pool.num_quarantined == 0
                and decode.slots.free_count == decode.slots.count
                and prefill.slots.free_count == prefill.slots.count
                and prefill.sender.open_pushes == 0
                and prefill.sender.unsettled_transfers == 0
            ),
            timeout_s,
        )
        decode.check()
        prefill.pool.check_integrity()
        assert prefill.pool.num_used == 0


async def eventually(condition, timeout_s=60.0):
    """Waits for a state that must come; the bound is for a machine that is busy elsewhere."""
    end = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < end, "condition not met in time"
        await asyncio.sleep(0.005)


def make_pair(transport, fabric, decode=None, prefill=None):
    return Pair(
        Prefill(transport, fabric, **(prefill or {})), Decode(transport, fabric, **(decode or {}))
    )


__all__ = ["SEAL_BYTES", "AgentConfig", "Decode", "Pair", "Prefill", "eventually", "make_pair"]
