"""Connections between agents beside the data."""

import socket
import time

from epd.transfer.wire_hub import WireHub
from tests.transfer.peers import wait_until


def test_a_connection_that_never_says_its_token_is_ended_and_one_that_has_stays():
    hub = WireHub("here", "127.0.0.1", hello_timeout_s=0.2)
    peer = WireHub("there", "127.0.0.1")
    heard: list[tuple[str, int, bytes]] = []

    def poll(condition):
        peer_events = list(peer.poll())
        heard.extend((name, kind, body) for _, name, kind, body in hub.poll())
        return condition() and not peer_events

    silent = socket.create_connection((hub.address.host, hub.address.port))
    silent.settimeout(60)
    try:
        silent.sendall(b"\x20")  # a hello that is never finished
        wire = peer.dial("here", hub.address)
        wire.send(1, b"hello")
        wait_until(lambda: poll(lambda: ("there", 1, b"hello") in heard))
        end = time.monotonic() + 0.3
        wait_until(lambda: poll(lambda: time.monotonic() > end))
        assert silent.recv(1) == b"", "it was closed"
        wire.send(1, b"still here")
        wait_until(lambda: poll(lambda: ("there", 1, b"still here") in heard))
    finally:
        silent.close()
        hub.close()
        peer.close()
