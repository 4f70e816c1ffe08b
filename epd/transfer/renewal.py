"""A connection that is to be made anew."""

import time
from concurrent.futures import Future

from epd.errors import EpdError, TransferFailedError
from epd.transfer.base import AgentDescriptor, TransferBackend


class Renewal:
    """Removes a peer and adds it again once no transfer with it is in flight.

    What is in flight would be torn off, and nobody could say who still touches which memory. So the
    agent thread waits for that and posts nothing new to the peer: under load there might always be
    something. After ``patience_s`` all goes on over the old connection, and whoever fails next asks
    again. Agent thread only, except for ``future``, which cannot be cancelled.
    """

    def __init__(self, peer: AgentDescriptor, patience_s: float) -> None:
        self.agent_name = peer.agent_name
        self.future: Future[None] = Future()
        self.future.set_running_or_notify_cancel()
        self._peer = peer
        self._patience_s = patience_s
        self._until = time.monotonic() + patience_s
        self._others: list[Renewal] = []

    @property
    def lapsed(self) -> bool:
        """Transfers have run for too long."""
        return time.monotonic() > self._until

    def join(self, other: "Renewal") -> None:
        """Lets another one of the same connection end with this one."""
        self._others.append(other)

    def run(self, backend: TransferBackend) -> None:
        """Nothing is in flight."""
        try:
            backend.remove_peer(self.agent_name)
            backend.add_peer(self._peer)
        except Exception as error:  # belongs to the caller: the thread lives on
            self._end(error)
        else:
            self._end(None)

    def give_up(self) -> None:
        """Leaves the connection as it is: something has been in flight all the time."""
        text = f"transfers with {self.agent_name} still run after {self._patience_s} s"
        self._end(TransferFailedError(f"the connection is not made anew: {text}"))

    def abandon(self, error: EpdError) -> None:
        """Fails it, because the agent ends or the peer has gone."""
        self._end(error)

    def _end(self, error: Exception | None) -> None:
        for one in (self, *self._others):
            if error is None:
                one.future.set_result(None)
            else:
                one.future.set_exception(error)
