"""Decode workers in and out of the data plane."""

import asyncio
from typing import cast

import pytest

from epd.engine.kv_layout import KvLayout, KvRegion
from epd.errors import LayoutMismatchError, TransferFailedError
from epd.handover.control import DecodeControl, PushTarget
from epd.handover.sender import KvSender
from epd.transfer.buffer import HostBuffer
from services.prefill.peer_link import DecodePeer
from services.prefill.push_peers import PushPeers
from tests.transfer.peers import ProcessPeer, open_agent

BYTES = 1 << 20


class Sender:
    """Notes who may be pushed to."""

    def __init__(self) -> None:
        self.targets: list[PushTarget] = []

    def peer_arrived(self, target: PushTarget) -> None:
        self.targets.append(target)

    def peer_gone(self, target: PushTarget) -> None:
        self.targets = [one for one in self.targets if one is not target]


def decode(process: ProcessPeer) -> DecodePeer:
    """A decode worker whose KV lies in that process."""
    region = KvRegion(0, 1, process.base.address, BYTES, 0, BYTES, BYTES)
    layout = KvLayout("aa", 1, 1, 8, "float32", 16, regions=(region,))
    target = PushTarget(process.descriptor, layout, cast(DecodeControl, None))
    return DecodePeer("decode:1", target)


@pytest.mark.parametrize(
    ("regions", "what"),
    [
        ((), "no region of KV memory holds layer 0"),
        ((KvRegion(0, 1, 4096, BYTES, 0, BYTES, BYTES),), "no region of KV memory holds layer 1"),
        ((KvRegion(1, 2, 4096, BYTES, 0, BYTES, BYTES),), "layers 1 to 2 of 2"),
        ((KvRegion(0, 0, 4096, BYTES, 0, BYTES, BYTES),), "layers 0 to -1 of 2"),
        ((KvRegion(0, 2, 4096, BYTES, 0, BYTES, BYTES),), "cannot hold 2 layers"),
        ((KvRegion(0, 2, 4096, 4 * BYTES, 0, BYTES, 8),), "cannot hold 2 layers"),
        ((KvRegion(0, 2, (1 << 64) - BYTES, BYTES, 0, 0, BYTES),), "cannot hold 2 layers"),
    ],
)
async def test_a_decode_worker_whose_memory_cannot_hold_its_layers_is_not_paired_with(
    regions: tuple[KvRegion, ...], what: str
) -> None:
    agent, scratch, sender = open_agent("local", "prefill"), HostBuffer(BYTES), Sender()
    peers = PushPeers(agent, cast(KvSender, sender), scratch.segment, False, probe_timeout_s=60)
    layout = KvLayout("aa", 2, 1, 8, "float32", 16, regions=regions)
    target = PushTarget(agent.descriptor(), layout, cast(DecodeControl, None))
    try:
        with pytest.raises(LayoutMismatchError, match=what):
            await peers.join(DecodePeer("decode:1", target))
        assert agent.alive
        assert not sender.targets
    finally:
        agent.stop()


async def test_a_decode_worker_that_hangs_while_it_is_paired_keeps_no_other_from_pairing() -> None:
    agent, scratch, sender = open_agent("nixl", "prefill"), HostBuffer(BYTES), Sender()
    agent.register(scratch.segment)
    hung, well = ProcessPeer("nixl", BYTES), ProcessPeer("nixl", BYTES)
    peers = PushPeers(agent, cast(KvSender, sender), scratch.segment, False, probe_timeout_s=0.5)
    try:
        hung.hang()
        async with asyncio.timeout(60):
            with pytest.raises(TransferFailedError, match="could not be read"):
                await peers.join(decode(hung))
            assert not sender.targets
            await peers.leave(decode(hung))
            peers._probe_timeout_s = 60  # this machine may stall
            other = decode(well)
            await peers.join(other)
            assert sender.targets == [other.target]
            hung.go_on()
            await peers.join(decode(hung))
            assert len(sender.targets) == 2
    finally:
        hung.kill()
        well.kill()
        agent.stop()
