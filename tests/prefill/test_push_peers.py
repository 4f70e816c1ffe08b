"""Decode workers in and out of the data plane."""

import asyncio
from typing import cast

import pytest

from epd.engine.kv_layout import KvLayout, KvRegion
from epd.errors import TransferFailedError
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
