"""Finding workers by list and by name."""

import pytest

from epd.errors import InvalidRequestError
from epd.rpc.discovery import Discovery, parse_discovery


async def test_fixed_items_and_resolved_names_are_one_set() -> None:
    discovery = Discovery(parse_discovery("10.0.0.1:7,dns:localhost:9", "decodes"))
    assert await discovery.addresses() == {"10.0.0.1:7", "127.0.0.1:9"}


async def test_a_name_that_stops_resolving_keeps_its_last_addresses(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    discovery = Discovery(parse_discovery("dns:localhost:9", "decodes"))
    assert await discovery.addresses() == {"127.0.0.1:9"}

    async def refuse(*_: object, **__: object) -> None:
        raise OSError("no name server")

    monkeypatch.setattr("asyncio.BaseEventLoop.getaddrinfo", refuse)
    assert await discovery.addresses() == {"127.0.0.1:9"}
    assert discovery.failed_lookups == 1


@pytest.mark.parametrize("text", ["localhost", "localhost:0", "localhost:x", ":5", "dns:name"])
def test_other_forms_are_refused(text: str) -> None:
    with pytest.raises(InvalidRequestError, match="host:port"):
        parse_discovery(text, "decodes")
