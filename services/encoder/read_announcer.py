"""Keeps the transfer agent attentive while peers may READ."""

from collections.abc import Callable

from epd.transfer.agent import TransferAgent


class ReadAnnouncer:
    """Announces READs to the agent exactly while an embedding is readable.

    Over some transports a READ makes progress only when its passive side polls too, and a quick
    poll all day would cost a core.
    """

    def __init__(self, agent: TransferAgent, readable: Callable[[], bool]) -> None:
        self._agent = agent
        self._readable = readable
        self._announced = False

    def update(self) -> None:
        """Called whenever leases have changed."""
        readable = self._readable()
        if readable and not self._announced:
            self._agent.announce()
        elif self._announced and not readable:
            self._agent.withdraw()
        self._announced = readable
