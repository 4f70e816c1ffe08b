"""A name server that does not answer keeps no more threads than there are names."""

import asyncio
import socket
import threading
from typing import Any

import pytest

from epd.rpc import discovery
from epd.rpc.discovery import Discovery, Member


async def test_a_look_up_that_hangs_is_waited_for_and_no_other_is_begun(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Requests need threads of the same few: for bodies, hashes and grammars."""
    answers, asked = threading.Event(), []

    def hanging(host: str, *_: Any, **__: Any) -> list[Any]:
        asked.append(host)
        answers.wait(60)
        return [(socket.AF_INET, socket.SOCK_STREAM, 0, "", ("10.0.0.1", 0))]

    monkeypatch.setattr(socket, "getaddrinfo", hanging)
    monkeypatch.setattr(discovery, "RESOLVE_TIMEOUT_S", 0.02)
    watch = Discovery(["dns:decode:1"], period_s=0.01).watch()
    first = asyncio.ensure_future(anext(watch))
    try:
        await asyncio.sleep(0.5)
        assert asked == ["decode"]
        assert not first.done()
        answers.set()
        async with asyncio.timeout(30):
            assert await first == Member("10.0.0.1:1", joined=True)
    finally:
        answers.set()
        first.cancel()
        await asyncio.wait({first})
