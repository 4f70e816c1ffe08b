"""Where the workers of a role are: a fixed list, or every A record of a name."""

import asyncio
import socket
from collections.abc import AsyncIterator
from dataclasses import dataclass

from epd.errors import InvalidRequestError

DNS_PREFIX = "dns:"


@dataclass(frozen=True)
class DiscoveryItem:
    """One item of a list of workers; ``is_dns`` items stand for every address of ``host``."""

    host: str
    port: int
    is_dns: bool


def parse_discovery(text: str, field: str) -> tuple[DiscoveryItem, ...]:
    """Reads ``host:port`` and ``dns:name:port`` items, separated by commas.

    Raises:
        InvalidRequestError: an item has another form; ``field`` names the setting.
    """
    items = []
    for part in filter(None, (piece.strip() for piece in text.split(","))):
        host, _, port = part.removeprefix(DNS_PREFIX).rpartition(":")
        if not host or not port.isdecimal() or not 0 < int(port) < 65536:
            raise InvalidRequestError(
                f"{part!r} is neither host:port nor dns:name:port", field=field
            )
        items.append(DiscoveryItem(host, int(port), part.startswith(DNS_PREFIX)))
    return tuple(items)


class Discovery:
    """The current addresses of a role's workers, as ``host:port``.

    A DNS item that does not resolve keeps its last addresses: a name server that is away must not
    empty a fleet that runs. Workers that are really gone are noticed by their health.

    Args:
        items: From :func:`parse_discovery`.
        period_s: Time between two look-ups of DNS items.
    """

    def __init__(self, items: tuple[DiscoveryItem, ...], period_s: float = 1.0) -> None:
        self._items = items
        self._period_s = period_s
        self._last: dict[DiscoveryItem, frozenset[str]] = {}
        #: Look-ups that failed since the start, for logs and metrics.
        self.failed_lookups = 0

    async def addresses(self) -> frozenset[str]:
        """All addresses now."""
        found: set[str] = set()
        for item in self._items:
            found |= await self._lookup(item) if item.is_dns else {f"{item.host}:{item.port}"}
        return frozenset(found)

    async def watch(self) -> AsyncIterator[frozenset[str]]:
        """The addresses at once and after every change; ends never, also without DNS items."""
        known: frozenset[str] | None = None
        while True:
            current = await self.addresses()
            if current != known:
                known = current
                yield current
            await asyncio.sleep(self._period_s)

    async def _lookup(self, item: DiscoveryItem) -> frozenset[str]:
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(self._period_s * 2):
                records = await loop.getaddrinfo(
                    item.host, item.port, family=socket.AF_INET, type=socket.SOCK_STREAM
                )
        except (OSError, TimeoutError):
            self.failed_lookups += 1
        else:
            self._last[item] = frozenset(f"{record[4][0]}:{item.port}" for record in records)
        return self._last.get(item, frozenset())
