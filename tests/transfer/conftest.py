"""Transports under test: NIXL between two processes, local between two agents of this one."""

import pytest

from epd.transfer.buffer import HostBuffer
from epd.transfer.factory import TRANSPORTS
from epd.transfer.local_backend import LocalFabric
from tests.transfer.peers import ProcessPeer, ThreadPeer, open_agent

PEER_BYTES = 32 << 20


@pytest.fixture(params=TRANSPORTS)
def transport(request):
    return request.param


@pytest.fixture
def fabric():
    return LocalFabric()


@pytest.fixture
def make_peer(transport, fabric, agent):
    """Makes peers that expect WRITEs of ``agent`` anywhere in their memory."""
    made = []

    def make():
        local = transport == "local"
        peer = (
            ThreadPeer("local", PEER_BYTES, fabric) if local else ProcessPeer(transport, PEER_BYTES)
        )
        made.append(peer)
        peer.expect(1, agent.descriptor().agent_name, 0, PEER_BYTES)
        return peer

    yield make
    for peer in made:
        peer.kill()


@pytest.fixture
def peer(make_peer):
    return make_peer()


@pytest.fixture
def buffer():
    return HostBuffer(PEER_BYTES)


@pytest.fixture
def agent(transport, fabric, buffer):
    agent = open_agent(transport, "me", fabric)
    agent.register(buffer.segment)
    yield agent
    agent.stop()
