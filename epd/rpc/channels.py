"""Channels to peers: one per address, reused."""

import grpc

from epd.cleanup import CleanupTasks
from epd.errors import ResourceExhaustedError
from epd.rpc.client_interceptors import client_interceptors
from epd.rpc.credentials import ChannelTls, make_channel
from epd.rpc.options import MESSAGE_BYTES, channel_options
from epd.telemetry.setup import Telemetry

#: Time for calls on a channel that gives way to another one.
FORGET_GRACE_S = 5.0


def open_channel(
    address: str,
    telemetry: Telemetry | None = None,
    message_bytes: int = MESSAGE_BYTES,
    tls: ChannelTls | None = None,
) -> grpc.aio.Channel:
    """A channel to ``host:port`` with this project's options; traced when telemetry is given."""
    interceptors = client_interceptors(telemetry, address) if telemetry else []
    return make_channel(address, channel_options(message_bytes), interceptors, tls)


class ChannelPool:
    """Keeps the channels of one service.

    Args:
        telemetry: The service's.
        message_bytes: Largest message sent or accepted.
        max_peers: Bound on open channels: each costs a file descriptor.
        forgets: Whether a new peer beyond the bound takes the place of the one that was asked for
            the longest time ago, instead of being refused. Only for calls that are short.
        tls: How the peers are reached; None is plain text.
    """

    def __init__(
        self,
        telemetry: Telemetry,
        *,
        message_bytes: int = MESSAGE_BYTES,
        max_peers: int = 1024,
        forgets: bool = False,
        tls: ChannelTls | None = None,
    ) -> None:
        self._telemetry = telemetry
        self._message_bytes = message_bytes
        self._max_peers = max_peers
        self._forgets = forgets
        self._tls = tls
        self._channels: dict[str, grpc.aio.Channel] = {}  # asked for least recently first
        self._closing = CleanupTasks()

    def __len__(self) -> int:
        return len(self._channels)

    def get(self, address: str) -> grpc.aio.Channel:
        """The channel to a peer, opened at the first call; connecting happens in the background.

        Raises:
            ResourceExhaustedError: there are ``max_peers`` open channels already.
        """
        if address not in self._channels:
            if len(self._channels) >= self._max_peers and self._forgets:
                oldest = self._channels.pop(next(iter(self._channels)))
                self._closing.spawn(oldest.close(FORGET_GRACE_S))
            elif len(self._channels) >= self._max_peers:
                raise ResourceExhaustedError(
                    f"{self._max_peers} peers are connected, no room for {address}",
                    reason="TOO_MANY_PEERS",
                )
            channel = open_channel(address, self._telemetry, self._message_bytes, self._tls)
        else:
            channel = self._channels.pop(address)
        self._channels[address] = channel
        return channel

    async def close(self, address: str, grace_s: float = 0.0) -> None:
        """Closes the channel to a peer that is gone; calls still running there are cancelled."""
        channel = self._channels.pop(address, None)
        if channel is not None:
            await channel.close(grace_s)

    async def close_all(self, grace_s: float = 0.0) -> None:
        """Closes every channel."""
        for address in list(self._channels):
            await self.close(address, grace_s)
