"""Transfer peers that a worker has connected to, by address."""

import asyncio
from collections import OrderedDict
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from epd.errors import UnavailableError
from epd.transfer.agent import TransferAgent
from epd.transfer.base import AgentDescriptor


class _Peer:
    def __init__(self) -> None:
        self.lock = asyncio.Lock()
        self.connected: AgentDescriptor | None = None
        self.users = 0
        #: A transfer failed: connect anew before the next use.
        self.suspect = False


class PeerTable:
    """Connects on first use and forgets the least recently used beyond ``limit``.

    A process that was restarted at the same address is a new peer: the old one is removed before
    the new one is added. Owned by the event loop.
    """

    def __init__(self, agent: TransferAgent, limit: int = 256) -> None:
        self._agent = agent
        self._limit = limit
        self._peers: OrderedDict[str, _Peer] = OrderedDict()  # least recently used first

    def __len__(self) -> int:
        return len(self._peers)

    @asynccontextmanager
    async def use(self, address: str, descriptor: AgentDescriptor) -> AsyncIterator[str]:
        """Connects and yields the agent name to transfer with; holds the connection inside.

        Raises:
            TransferFailedError: the peer cannot be connected.
            UnavailableError: too many peers are in use.
        """
        peer = self._peers.get(address)
        if peer is None:
            self._make_room()
            peer = self._peers[address] = _Peer()
        self._peers.move_to_end(address)
        peer.users += 1
        try:
            async with peer.lock:
                await self._connect(peer, descriptor)
            yield descriptor.agent_name
        finally:
            peer.users -= 1

    def suspect(self, address: str) -> None:
        """A transfer with the peer failed: its connection may be broken for good."""
        if address in self._peers:
            self._peers[address].suspect = True

    async def _connect(self, peer: _Peer, descriptor: AgentDescriptor) -> None:
        old = peer.connected
        if old == descriptor:
            if peer.suspect:  # the agent waits for READs of others
                await asyncio.wrap_future(self._agent.reconnect(descriptor))
                peer.suspect = False
            return
        if old is not None:
            peer.connected = None
            self._agent.disconnect(old.agent_name)
        await asyncio.wrap_future(self._agent.connect(descriptor))
        peer.connected = descriptor
        peer.suspect = False

    def _make_room(self) -> None:
        for address, peer in list(self._peers.items()):
            if len(self._peers) < self._limit:
                return
            if not peer.users:
                del self._peers[address]
                if peer.connected is not None:
                    self._agent.disconnect(peer.connected.agent_name)
        if len(self._peers) >= self._limit:
            raise UnavailableError(f"{self._limit} transfer peers are in use")
