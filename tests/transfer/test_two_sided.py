"""What a transport whose receiving end takes part must refuse."""

import contextlib
import socket
import struct

import pytest

from epd.errors import TransferFailedError
from epd.transfer.collective_message import GroupInvitation, Kind
from epd.transfer.wire_address import WireAddress
from tests.transfer.peers import ThreadPeer

WAIT = 60
PEER_BYTES = 32 << 20


@pytest.fixture(params=["collective"])
def transport(request):
    return request.param


@pytest.fixture
def connected(agent, peer):
    agent.connect(peer.descriptor).result(WAIT)
    return peer


def write(agent, buffer, peer, offset, length, notice=b""):
    return agent.write(
        peer.descriptor.agent_name, [buffer.part(0, length)], [peer.at(offset, length)], notice
    )


def test_it_says_that_it_needs_receive_plans(agent, transport):
    assert agent.needs_plan(transport)


def test_a_write_outside_the_receive_plan_is_refused_and_leaves_no_trace(agent, buffer, connected):
    me = agent.descriptor().agent_name
    connected.forget(1)
    connected.expect(7, me, 1000, 500)
    connected.expect(8, "somebody else", 0, 1000)
    buffer.view()[:] = 9
    write(agent, buffer, connected, 1000, 500, b"inside").result(WAIT)
    assert connected.notices(1) == [(me, b"inside")]
    for offset, length in ((999, 500), (1001, 500), (0, 10)):
        with pytest.raises(TransferFailedError):
            write(agent, buffer, connected, offset, length, b"outside").result(WAIT)
    assert connected.notices(1, 0.1) == []
    assert connected.peek(0, 1000) == bytes(1000)
    assert connected.peek(1500, 10) == bytes(10)


def test_no_write_lands_once_its_plan_is_forgotten(agent, buffer, connected):
    """Between pieces as well: the next one is refused."""
    write(agent, buffer, connected, 0, 100).result(WAIT)
    connected.forget(1)
    buffer.view()[:] = 9
    with pytest.raises(TransferFailedError):
        write(agent, buffer, connected, 0, 100).result(WAIT)
    assert connected.peek(0, 100) == bytes(100)
    connected.expect(2, agent.descriptor().agent_name, 0, PEER_BYTES)
    write(agent, buffer, connected, 0, 100).result(WAIT)
    assert connected.peek(0, 100) == bytes([9]) * 100


def test_two_agents_that_connect_to_each_other_move_data_both_ways(agent, buffer):
    other = ThreadPeer("collective", PEER_BYTES, None)
    try:
        me = agent.descriptor()
        other.expect(1, me.agent_name, 0, PEER_BYTES)
        waits = [agent.connect(other.descriptor), other.agent.connect(me)]
        assert [one.result(WAIT) for one in waits] == [None, None]
        other.poke(0, b"theirs")
        buffer.view(64, 4)[:] = list(b"mine")
        done = [
            other.agent.read(me.agent_name, [other.at(32, 4)], [buffer.part(64, 4)]),
            agent.read(other.descriptor.agent_name, [buffer.part(0, 6)], [other.at(0, 6)]),
        ]
        assert [one.result(WAIT).byte_count for one in done] == [4, 6]
        assert other.peek(32, 4) == b"mine"
        assert buffer.view(0, 6).tobytes() == b"theirs"
    finally:
        other.kill()


def test_a_peer_that_leaves_ends_its_transfers_at_once(agent, buffer, connected):
    """Its process hangs, so nothing but the disconnect can end them."""
    write(agent, buffer, connected, 0, 100).result(WAIT)
    connected.hang()
    stuck = write(agent, buffer, connected, 0, 1 << 20)
    agent.disconnect(connected.descriptor.agent_name).result(WAIT)
    with pytest.raises(TransferFailedError):
        stuck.result(WAIT)


def test_a_connection_without_the_token_is_refused(agent, buffer, connected):
    known = connected.descriptor
    forged = bytearray(known.metadata)
    forged[5] ^= 0xFF
    agent.disconnect(known.agent_name).result(WAIT)
    agent.connect(type(known)(**{**vars(known), "metadata": bytes(forged)})).result(WAIT)
    with pytest.raises(TransferFailedError):
        write(agent, buffer, connected, 0, 100).result(WAIT)


def test_frames_that_make_no_sense_end_their_connection_and_nothing_else(agent, buffer, connected):
    """Sent with the right token, as a peer of another version might."""
    write(agent, buffer, connected, 0, 100).result(WAIT)
    address = WireAddress.decode(connected.descriptor.metadata)
    strange = [
        (Kind.GROUP, GroupInvitation("127.0.0.1", 9, on_device=True).encode()),
        (Kind.GROUP, b""),
        (Kind.OFFER, b"\xff" * 12),
        (Kind.FETCHED, b"\1" * 8),
        (Kind.LANDED, b""),
        (99, b"?"),
    ]
    for kind, body in strange:
        with socket.create_connection((address.host, address.port), WAIT) as stranger:
            stranger.sendall(_frame(0, address.token + b"stranger") + _frame(kind, body))
            with contextlib.suppress(ConnectionResetError):  # the end, with some of it unread
                assert stranger.recv(1) == b"", kind
    write(agent, buffer, connected, 0, 100, b"still here").result(WAIT)
    assert [notice for _, notice in connected.notices(1)] == [b"still here"]


def _frame(kind, body):
    return struct.pack("<IB", len(body), kind) + body
