"""A client that goes away while it is answered: counted as cancelled, and quiet."""

import asyncio
import logging
from typing import Any

import grpc
import pytest

from epd.rpc.sending import aborted, written
from epd.telemetry.prometheus import scrape
from tests.support.rpc_pair import rpc_pair

SERVICE = "epd.v1.FloodService"
STREAMS = 30


async def flood(request: bytes, context: Any) -> Any:
    """Sends as fast as it is read."""
    while True:
        yield bytes(2000)
        await asyncio.sleep(0)


def add_flood(handlers: Any) -> None:
    methods = {"Flood": grpc.unary_stream_rpc_method_handler(flood)}
    handlers.add_generic_rpc_handlers([grpc.method_handlers_generic_handler(SERVICE, methods)])


@pytest.mark.parametrize("how", ["cancel", "close"])
async def test_streams_whose_clients_go_away_are_counted_as_cancelled_and_log_nothing(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, how: str
) -> None:
    caplog.set_level(logging.WARNING)
    monkeypatch.setattr("epd.rpc.sending._CANCEL_S", 60.0)
    async with rpc_pair(monkeypatch, [(SERVICE, add_flood)], metrics_port=0) as pair:
        address = pair.server_telemetry.metrics_address
        async with grpc.aio.insecure_channel(pair.server.address) as channel:
            ask: Any = channel.unary_stream(f"/{SERVICE}/Flood")  # type: ignore[call-arg]
            calls = [ask(b"") for _ in range(STREAMS)]
            for call in calls:
                await call.read()
            await asyncio.sleep(0.5)  # they read no more: the next messages wait for room
            if how == "close":
                await channel.close(None)
            for call in calls:
                call.cancel()
        counted: dict[str, float] = {}
        async with asyncio.timeout(30):
            while sum(counted.values()) < STREAMS:
                await asyncio.sleep(0.05)
                scraped = await asyncio.to_thread(scrape, address)
                counted = {
                    code: scraped.total(
                        "rpc_server_call_duration_seconds_count",
                        rpc_method=f"{SERVICE}/Flood",
                        rpc_response_status_code=code,
                    )
                    for code in ("CANCELLED", "UNKNOWN", "OK")
                }
    assert counted == {"CANCELLED": STREAMS, "UNKNOWN": 0, "OK": 0}
    assert [record.getMessage() for record in caplog.records] == []


async def failing() -> None:
    raise grpc.aio.InternalError("Failed to execute batch")


async def test_a_failed_write_ends_with_the_cancellation_that_grpc_brings(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("epd.rpc.sending._CANCEL_S", 60.0)
    sending = asyncio.create_task(written(failing()))
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert not sending.done()
    assert sending.cancel("from grpc")
    with pytest.raises(asyncio.CancelledError, match="from grpc"):
        await sending


async def test_a_status_that_reaches_nobody_ends_the_call_at_once_and_quietly(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with pytest.raises(asyncio.CancelledError):
        async with asyncio.timeout(1.5):  # gRPC is waited for longer after a write
            await aborted(failing())
    assert caplog.records == []


async def test_a_write_that_fails_though_the_client_is_there_is_told_in_the_log(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("epd.rpc.sending._CANCEL_S", 0.01)
    with pytest.raises(asyncio.CancelledError):
        await written(failing())
    assert "cannot be answered" in caplog.text
