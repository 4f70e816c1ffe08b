"""Which addresses make up a set of workers: static ones, and DNS names resolved again and again."""

import asyncio
import logging
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass

from epd.rpc.credentials import join_address, split_address

_log = logging.getLogger(__name__)
DNS_PREFIX = "dns:"
RESOLVE_TIMEOUT_S = 5.0

#: Addresses of a host; empty when the name is known to have none. Raises OSError otherwise.
Resolver = Callable[[str], Awaitable[frozenset[str]]]


@dataclass(frozen=True)
class Member:
    """A change of the set: ``address`` (host:port) has joined or left."""

    address: str
    joined: bool


async def resolve_host(host: str) -> frozenset[str]:
    """Every A record of a name, off the event loop.

    Raises:
        OSError: the resolver does not answer; what was known before still holds.
    """
    loop = asyncio.get_running_loop()
    try:
        found = await loop.getaddrinfo(host, None, family=socket.AF_INET)
    except socket.gaierror as error:
        if error.errno in (socket.EAI_NONAME, socket.EAI_NODATA):
            return frozenset()
        raise
    return frozenset(str(info[4][0]) for info in found)


class Discovery:
    """A set of workers given by items ``host:port`` and ``dns:name:port``.

    Args:
        items: The set as configured.
        period_s: How often names are resolved.
        resolve: The resolver.

    Raises:
        ConfigError: an item has neither form.
    """

    def __init__(
        self, items: Sequence[str], *, period_s: float = 1.0, resolve: Resolver = resolve_host
    ) -> None:
        self._static = [join_address(*split_address(i)) for i in items if not _is_dns(i)]
        self._names = [split_address(i.removeprefix(DNS_PREFIX)) for i in items if _is_dns(i)]
        self._found: dict[tuple[str, int], frozenset[str]] = {}
        self._failing: set[tuple[str, int]] = set()
        #: Look-ups by host that have not ended in time. Each keeps a thread of the loop's few until
        #: the system's resolver gives up, so no other is begun meanwhile.
        self._slow: dict[str, asyncio.Future[frozenset[str]]] = {}
        self._period_s = period_s
        self._resolve = resolve
        self._members = frozenset(self._static)

    @property
    def empty(self) -> bool:
        """Whether nothing is named, so that nobody can ever be a member."""
        return not self._static and not self._names

    @property
    def members(self) -> frozenset[str]:
        """The set as of the last look; static items are there from the start."""
        return self._members

    async def watch(self) -> AsyncIterator[Member]:
        """Yields every member now in the set, then each change, for ever."""
        told: frozenset[str] = frozenset()
        try:
            while True:
                await self._look()
                for address in sorted(told - self._members):
                    yield Member(address, joined=False)
                for address in sorted(self._members - told):
                    yield Member(address, joined=True)
                told = self._members
                await asyncio.sleep(self._period_s)
        finally:
            for lookup in self._slow.values():
                lookup.cancel()

    async def _look(self) -> None:
        for name in self._names:
            host, port = name
            try:
                hosts = await self._lookup(host)
            except OSError as error:  # TimeoutError is one
                if name not in self._failing:
                    _log.warning("cannot resolve %s, keeping what is known: %s", host, error)
                self._failing.add(name)
                continue
            self._failing.discard(name)
            self._found[name] = frozenset(join_address(found, port) for found in hosts)
        self._members = frozenset(self._static).union(*self._found.values())

    async def _lookup(self, host: str) -> frozenset[str]:
        """What the resolver says within the time-out, of a look-up begun now or before.

        Raises:
            OSError: it fails, or does not answer in time.
        """
        lookup = self._slow.pop(host, None) or asyncio.ensure_future(self._resolve(host))
        try:
            await asyncio.wait({lookup}, timeout=RESOLVE_TIMEOUT_S)
            if lookup.done():
                return lookup.result()
        except asyncio.CancelledError:
            lookup.cancel()
            raise
        self._slow[host] = lookup
        raise TimeoutError(f"no answer within {RESOLVE_TIMEOUT_S:g} s")


def _is_dns(item: str) -> bool:
    return item.startswith(DNS_PREFIX)
