"""Connections to allowed addresses only: the connect step under the HTTP library.

A name is looked up once, all of its addresses are checked, and the connection goes to one of those
addresses, not to the name: an answer of the name server that changes in between (DNS rebinding)
changes nothing. TLS still checks the certificate against the name.
"""

import asyncio
import socket
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Executor

import httpcore2

from services.router.image_urls.address_rule import AddressRule

#: From host and port to addresses; blocks. Raises OSError.
Resolver = Callable[[str, int], Sequence[str]]


class ForbiddenAddressError(Exception):
    """The name has an address that must not be connected to."""


def system_addresses(host: str, port: int) -> list[str]:
    """All addresses of a name as the system's resolver tells them; blocks."""
    found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    return [str(address[0]) for _, _, _, _, address in found]


class GuardedBackend(httpcore2.AsyncNetworkBackend):
    """Opens TCP connections for the HTTP library.

    Args:
        rule: Decides on addresses.
        threads: Where look-ups run: a slow name server must hold up nothing else.
        resolve: Looks a name up.
    """

    def __init__(
        self, rule: AddressRule, threads: Executor, resolve: Resolver = system_addresses
    ) -> None:
        self._rule = rule
        self._threads = threads
        self._resolve = resolve
        self._backend = httpcore2.AnyIOBackend()

    async def connect_tcp(
        self,
        host: str,
        port: int,
        timeout: float | None = None,  # noqa: ASYNC109 - the library's signature
        local_address: str | None = None,
        socket_options: Iterable[httpcore2.SOCKET_OPTION] | None = None,
    ) -> httpcore2.AsyncNetworkStream:
        """A connection to the first address of ``host`` that answers.

        Raises:
            ForbiddenAddressError: one of its addresses is not allowed, whichever it is.
            httpcore2.ConnectError: there is no such name, or nobody answers.
        """
        loop = asyncio.get_running_loop()
        try:
            addresses = await loop.run_in_executor(self._threads, self._resolve, host, port)
        except (OSError, UnicodeError) as error:  # of labels that are empty or too long
            raise httpcore2.ConnectError("the name was not found") from error
        if not all(self._rule.allows(address) for address in addresses):
            raise ForbiddenAddressError
        for address in addresses:
            try:
                stream = await self._backend.connect_tcp(
                    address, port, timeout, local_address, socket_options
                )
            except httpcore2.ConnectError:
                continue
            return await self._checked(stream)
        raise httpcore2.ConnectError("nobody answers")

    async def connect_unix_socket(
        self,
        path: str,
        timeout: float | None = None,  # noqa: ASYNC109 - the library's signature
        socket_options: Iterable[httpcore2.SOCKET_OPTION] | None = None,
    ) -> httpcore2.AsyncNetworkStream:
        """No URL leads to a socket of this machine."""
        raise ForbiddenAddressError

    async def sleep(self, seconds: float) -> None:
        """As the library's own."""
        await asyncio.sleep(seconds)

    async def _checked(self, stream: httpcore2.AsyncNetworkStream) -> httpcore2.AsyncNetworkStream:
        """The connection, once the system has confirmed where it leads."""
        peer = stream.get_extra_info("server_addr")
        if peer is None or not self._rule.allows(str(peer[0])):
            await stream.aclose()
            raise ForbiddenAddressError
        return stream
