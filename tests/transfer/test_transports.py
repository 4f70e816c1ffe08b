"""Several transports behind one agent."""

import pytest

from epd.errors import TransferFailedError, UnsupportedFeatureError
from epd.transfer.buffer import HostBuffer
from epd.transfer.factory import backend_opener
from tests.transfer.peers import ProcessPeer, open_agent

WAIT = 60
SIZE = 1 << 20


@pytest.fixture
def both():
    agent = open_agent("nixl,collective", "me")
    yield agent
    agent.stop()


def test_descriptors_come_in_order_of_preference_under_one_name(both):
    found = both.descriptors()
    assert [one.transport for one in found] == ["nixl", "collective"]
    assert len({(one.agent_name, one.instance_id) for one in found}) == 1
    assert (both.needs_plan("nixl"), both.needs_plan("collective")) == (False, True)


def test_peers_over_different_transports_are_served_at_the_same_time(both):
    buffer = HostBuffer(SIZE)
    both.register(buffer.segment)
    buffer.view()[:] = 5
    peers = [ProcessPeer(transport, SIZE) for transport in ("nixl", "collective")]
    try:
        me = both.descriptor().agent_name
        for peer in peers:
            peer.expect(1, me, 0, SIZE)
            both.connect(peer.descriptor).result(WAIT)
        done = [
            both.write(peer.descriptor.agent_name, [buffer.part(0, 99)], [peer.at(0, 99)], b"x")
            for peer in peers
        ]
        assert [one.result(WAIT).byte_count for one in done] == [99, 99]
        for peer in peers:
            assert peer.notices(1) == [(me, b"x")]
            assert peer.peek(0, 100) == bytes([5]) * 99 + bytes(1)
    finally:
        for peer in peers:
            peer.kill()


def test_a_peer_over_a_transport_that_is_not_here_is_refused(both):
    peer = ProcessPeer("mooncake", SIZE)
    try:
        with pytest.raises(TransferFailedError, match="mooncake, this process has nixl,collective"):
            both.connect(peer.descriptor).result(WAIT)
    finally:
        peer.kill()


@pytest.mark.parametrize("transports", [(), ("nixl", "pigeon")])
def test_unknown_or_no_transports_are_refused(transports):
    with pytest.raises(UnsupportedFeatureError, match="known are"):
        backend_opener(transports, "me", "me")
