"""How a client outside the fleet protects its connections."""

import asyncio

from epd.cleanup import cancel_and_wait
from epd.rpc.credentials import ChannelTls, refuse_plain_text_peers
from epd.rpc.tls_config import ClientTlsConfig
from epd.rpc.tls_files import TlsFiles


class ClientTls:
    """A client's certificates, kept up to date between :meth:`start` and :meth:`stop`.

    Args:
        config: Which.
        address: The router's; where it is not loopback, plain text needs ``config.insecure``.

    Raises:
        ConfigError: plain text is not allowed, or a file cannot be read.
    """

    def __init__(self, config: ClientTlsConfig, address: str) -> None:
        if not config.on:
            refuse_plain_text_peers([address], insecure=config.insecure)
        self._files = TlsFiles(config) if config.on else None
        self._server_name = config.tls_server_name
        self._watching: asyncio.Task[None] | None = None

    @property
    def channel(self) -> ChannelTls | None:
        """For the channel to the router; None is plain text."""
        return self.channel_to(self._server_name)

    def channel_to(self, server_name: str) -> ChannelTls | None:
        """The same, to a server whose certificate has this name; empty: its host's."""
        return ChannelTls(self._files, server_name) if self._files else None

    def start(self) -> None:
        """Begins to follow changes of the files, where there are any."""
        if self._files is not None and self._watching is None:
            self._watching = asyncio.create_task(self._files.watch())

    async def stop(self) -> None:
        """Ends that."""
        if self._watching is not None:
            await cancel_and_wait(self._watching)
            self._watching = None
