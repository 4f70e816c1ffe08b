"""All connections of one agent: those it has made and those made to it."""

import errno
import hmac
import logging
import secrets
import selectors
import socket
import time
from collections.abc import Iterator

from epd.errors import TransferFailedError, UnavailableError
from epd.transfer.wire import Wire
from epd.transfer.wire_address import WireAddress

log = logging.getLogger(__name__)

#: Kind of what :meth:`WireHub.poll` gives for a connection that has ended; the body says why.
ENDED = 0
_HELLO = 0
_TOKEN_BYTES = 16
#: Connections of both kinds, greeted or not.
MAX_CONNECTIONS = 4096
#: A peer says its token with its first bytes; who has not by then would keep a place for nothing.
HELLO_TIMEOUT_S = 10.0


class WireHub:
    """Each connection serves the transfers of the agent that made it, so two agents that connect to
    each other at the same moment have two connections and nothing to agree on.

    Used by the agent thread only; nothing blocks. Frame kinds from 1 on belong to the user.

    Args:
        agent_name: What this agent tells its peers.
        host: Numeric address by which peers reach this agent.
        hello_timeout_s: A connection without a whole hello is ended after so long.
    """

    def __init__(
        self, agent_name: str, host: str, hello_timeout_s: float = HELLO_TIMEOUT_S
    ) -> None:
        self._agent_name = agent_name
        self._hello_timeout_s = hello_timeout_s
        self._listener = _listen(host)
        port = self._listener.getsockname()[1]
        self.address = WireAddress(host, port, secrets.token_bytes(_TOKEN_BYTES))
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._listener, selectors.EVENT_READ)
        # Name of the peer; None until it has said it.
        self._names: dict[Wire, str | None] = {}
        #: Connections without a hello, the oldest first, and when each must have said it.
        self._silent: dict[Wire, float] = {}
        self._dialled: dict[str, Wire] = {}
        self._ended: list[tuple[Wire, str, str]] = []

    def dial(self, agent_name: str, address: WireAddress) -> Wire:
        """Begins a connection; frames may be sent at once. It replaces a former one.

        Raises:
            TransferFailedError: there is no way to that address.
        """
        if agent_name in self._dialled:
            self._end(self._dialled[agent_name], "connected anew")
        try:
            family, kind, protocol, _, where = socket.getaddrinfo(
                address.host, address.port, type=socket.SOCK_STREAM, flags=socket.AI_NUMERICHOST
            )[0]
            connection = socket.socket(family, kind, protocol)
            connection.setblocking(False)
            answer = connection.connect_ex(where)
            if answer not in (0, errno.EINPROGRESS):
                connection.close()
                raise OSError(answer, "cannot connect")
        except OSError as error:
            raise TransferFailedError(f"no way to {agent_name}: {error}") from error
        wire = self._dialled[agent_name] = self._watch(connection, agent_name)
        wire.send(_HELLO, address.token + self._agent_name.encode())
        return wire

    def drop(self, agent_name: str) -> None:
        """Ends all connections with a peer; an unknown name is fine."""
        for wire in [wire for wire, name in self._names.items() if name == agent_name]:
            self._end(wire, "this side has forgotten the peer")

    def poll(self) -> Iterator[tuple[Wire, str, int, bytes]]:
        """What has arrived: connection, name of its peer, kind and body of the frame."""
        for wire in list(self._names):
            wire.flush()
        for key, _ in self._selector.select(0):
            if key.fileobj is self._listener:
                self._accept()
                continue
            wire = key.data
            for kind, body in wire.receive():
                name = self._names.get(wire)
                if name is not None:
                    yield wire, name, kind, body
                else:
                    self._greet(wire, kind, body)
            if wire.closed is not None:
                self._end(wire, wire.closed)
        self._end_silent()  # last: what came while this process stood still has been read
        ended, self._ended = self._ended, []
        for wire, name, reason in ended:
            yield wire, name, ENDED, reason.encode()

    def close(self) -> None:
        """Ends everything."""
        for wire in list(self._names):
            self._end(wire, "the agent ends")
        self._selector.close()
        self._listener.close()

    def _accept(self) -> None:
        try:
            connection, where = self._listener.accept()
        except OSError as error:  # it was gone again, or this process has no descriptor left
            log.warning("a connection could not be taken: %s", error)
            return
        if len(self._names) >= MAX_CONNECTIONS:
            log.warning("%d connections are open, none more from %s", len(self._names), where)
            connection.close()
            return
        connection.setblocking(False)
        wire = self._watch(connection, None)
        self._silent[wire] = time.monotonic() + self._hello_timeout_s

    def _end_silent(self) -> None:
        now = time.monotonic()
        for wire in [wire for wire, until in self._silent.items() if until <= now]:
            log.warning("a connection has said nothing in %s s", self._hello_timeout_s)
            self._end(wire, "no hello")

    def _watch(self, connection: socket.socket, name: str | None) -> Wire:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        wire = Wire(connection)
        self._selector.register(connection, selectors.EVENT_READ, wire)
        self._names[wire] = name
        return wire

    def _greet(self, wire: Wire, kind: int, body: bytes) -> None:
        token, name = body[:_TOKEN_BYTES], body[_TOKEN_BYTES:]
        if kind != _HELLO or not name or not hmac.compare_digest(token, self.address.token):
            log.warning("a connection without this process's token is refused")
            self._end(wire, "no token")
        elif wire in self._names:
            self._names[wire] = name.decode(errors="replace")
            del self._silent[wire]

    def _end(self, wire: Wire, reason: str) -> None:
        if wire not in self._names:
            return
        wire.close(reason)
        self._selector.unregister(wire.socket)
        wire.socket.close()
        name = self._names.pop(wire)
        self._silent.pop(wire, None)
        if name is not None:
            if self._dialled.get(name) is wire:
                del self._dialled[name]
            self._ended.append((wire, name, wire.closed or reason))


def _listen(host: str) -> socket.socket:
    """A listener; on all addresses where ``host`` belongs to a gateway in front of this machine."""
    for where in (host, ""):
        try:
            listener = socket.create_server((where, 0), backlog=128)
        except OSError as error:
            if where and error.errno == errno.EADDRNOTAVAIL:
                continue
            raise UnavailableError(f"cannot listen on {where or 'any address'}: {error}") from error
        listener.setblocking(False)
        return listener
    raise AssertionError("not reached")
