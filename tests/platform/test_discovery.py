"""Sets of workers: static items and names that are resolved again and again."""

import asyncio
import socket

import pytest

from epd.config import ConfigError
from epd.rpc.discovery import Discovery, Member, resolve_host


class Names:
    """A resolver whose answers a test sets."""

    def __init__(self, *hosts):
        self.hosts = frozenset(hosts)
        self.error = None
        self.asked = 0

    async def __call__(self, host):
        self.asked += 1
        if self.error:
            raise self.error
        return self.hosts


async def changes(watch, count):
    async with asyncio.timeout(20):
        return [await anext(watch) for _ in range(count)]


async def test_static_items_are_members_from_the_start_and_never_change():
    discovery = Discovery(["127.0.0.1:1", "[::1]:2"], period_s=0.01)
    assert discovery.members == {"127.0.0.1:1", "[::1]:2"}
    watch = discovery.watch()
    joined = await changes(watch, 2)
    assert joined == [Member("127.0.0.1:1", True), Member("[::1]:2", True)]
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.1):
            await anext(watch)


async def test_every_address_of_a_name_is_a_worker_and_changes_are_told():
    names = Names("10.0.0.1", "10.0.0.2")
    discovery = Discovery(["dns:decode:50051"], period_s=0.01, resolve=names)
    watch = discovery.watch()
    assert await changes(watch, 2) == [
        Member("10.0.0.1:50051", True),
        Member("10.0.0.2:50051", True),
    ]
    names.hosts = frozenset({"10.0.0.2", "10.0.0.3"})
    assert await changes(watch, 2) == [
        Member("10.0.0.1:50051", False),
        Member("10.0.0.3:50051", True),
    ]
    assert discovery.members == {"10.0.0.2:50051", "10.0.0.3:50051"}


async def test_a_resolver_that_does_not_answer_changes_nothing(caplog):
    names = Names("10.0.0.1")
    discovery = Discovery(["dns:decode:1"], period_s=0.01, resolve=names)
    watch = discovery.watch()
    await changes(watch, 1)
    names.error = socket.gaierror(socket.EAI_AGAIN, "try again")
    waiting = asyncio.ensure_future(anext(watch))
    asked = names.asked
    async with asyncio.timeout(20):
        while names.asked < asked + 3:
            await asyncio.sleep(0.01)
    assert not waiting.done()
    assert caplog.text.count("cannot resolve decode") == 1
    names.error, names.hosts = None, frozenset()
    assert await waiting == Member("10.0.0.1:1", False)


async def test_a_real_name_resolves_and_an_unknown_one_has_no_members(monkeypatch):
    assert await resolve_host("localhost") == {"127.0.0.1"}

    def unknown(*arguments, **options):
        """Asking a name server takes as long as that takes, and there may be none."""
        raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")

    monkeypatch.setattr(socket, "getaddrinfo", unknown)
    assert await resolve_host("no-such-name.invalid") == frozenset()


@pytest.mark.parametrize("item", ["localhost", "dns:decode", ":1", "a:0", "a:99999", "a:b"])
def test_an_item_of_another_form_is_refused(item):
    with pytest.raises(ConfigError, match="is not host:port"):
        Discovery([item])
