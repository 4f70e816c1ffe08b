"""The decode workers this prefill worker may push to: its own discovery set, always paired."""

import asyncio
from collections.abc import Awaitable, Callable, Iterable

from epd.errors import NotFoundError
from epd.rpc.discovery import Discovery
from services.prefill.peer_link import DecodePeer, PeerLink


class DecodePeers:
    """One link per address of the discovery set; no other address is ever dialled.

    Args:
        discovery: Who belongs to the set.
        make_link: Makes the link to a new member.
        pair_wait_s: How long a request waits for an address that the router has discovered a
            moment earlier, and for a member that is not paired yet.
        on_left: Called with the address of a member that has left, once its link has ended: what
            is still open to it shall be closed.
    """

    def __init__(
        self,
        discovery: Discovery,
        make_link: Callable[[str], PeerLink],
        pair_wait_s: float,
        on_left: Callable[[str], Awaitable[None]],
    ) -> None:
        self._discovery = discovery
        self._make_link = make_link
        self._pair_wait_s = pair_wait_s
        self._on_left = on_left
        self._links: dict[str, PeerLink] = {}
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._changed = asyncio.Condition()

    async def run(self) -> None:
        """Follows the discovery set until cancelled."""
        async with asyncio.TaskGroup() as group:
            async for member in self._discovery.watch():
                if member.joined:
                    link = self._links[member.address] = self._make_link(member.address)
                    self._tasks[member.address] = group.create_task(link.run())
                else:
                    del self._links[member.address]
                    task = self._tasks.pop(member.address)
                    task.cancel()
                    # Before the same address can join again, with a connection of its own.
                    await asyncio.wait({task})
                    await self._on_left(member.address)
                async with self._changed:
                    self._changed.notify_all()

    def links(self) -> Iterable[PeerLink]:
        """The links to all members, for status and metrics."""
        return tuple(self._links.values())

    async def find(self, address: str, instance_id: str) -> DecodePeer:
        """The paired peer a request names.

        Raises:
            NotFoundError: no member has the address, or another process runs there now.
            LayoutMismatchError: the member's KV does not fit; both values are named.
            UnavailableError: the member is not paired.
        """
        link = await self._member(address)
        peer = await link.wait_up(self._pair_wait_s)
        if peer.instance_id != instance_id:
            raise NotFoundError(
                f"decode worker {address} runs as {peer.instance_id}, not as {instance_id}",
                reason="EARLIER_INSTANCE",
            )
        return peer

    async def _member(self, address: str) -> PeerLink:
        try:
            async with asyncio.timeout(self._pair_wait_s), self._changed:
                await self._changed.wait_for(lambda: address in self._links)
            return self._links[address]
        except TimeoutError:
            raise NotFoundError(
                f"decode worker {address} is not in this worker's discovery set",
                reason="NOT_A_MEMBER",
            ) from None
