"""Channel options, limits of messages and peers, deadlines."""

import asyncio
import time
from pathlib import Path
from typing import Any
from unittest import mock

import grpc
import pytest
from grpc._cython import cygrpc  # type: ignore[attr-defined]

from epd.config import ConfigError
from epd.errors import DeadlineExceededError, ResourceExhaustedError
from epd.rpc.channels import ChannelPool, open_channel
from epd.rpc.credentials import is_loopback, join_address, split_address
from epd.rpc.deadlines import remaining_s
from epd.rpc.options import MAX_UNACCEPTED_S, MESSAGE_BYTES, channel_options, server_options
from epd.telemetry.setup import start_telemetry
from epd.v1 import prefill_pb2, prefill_pb2_grpc
from tests.support.rpc_pair import rpc_pair


def test_grpc_knows_every_option_by_that_name():
    """A misspelt option is ignored without a word."""
    core = Path(cygrpc.__file__).read_bytes()
    for name, _ in (*server_options(), *channel_options()):
        assert name.encode() + b"\0" in core, name
    assert b"grpc.no_such_option\0" not in core


def test_the_client_pings_no_oftener_than_the_server_allows():
    client: dict[str, Any] = dict(channel_options())
    server: dict[str, Any] = dict(server_options())
    least = server["grpc.http2.min_ping_interval_without_data_ms"]
    assert client["grpc.keepalive_time_ms"] >= least
    assert client["grpc.keepalive_time_ms"] == 60_000
    assert client["grpc.keepalive_timeout_ms"] == 20_000
    assert client["grpc.keepalive_permit_without_calls"] == 0
    assert client["grpc.enable_retries"] == 0, "only the router retries"


class Measuring(prefill_pb2_grpc.PrefillServiceServicer):
    left_s: float

    async def Prefill(self, request, context):
        type(self).left_s = remaining_s(context, 60.0)
        yield prefill_pb2.PrefillResponse()


def add_measuring(handlers):
    prefill_pb2_grpc.add_PrefillServiceServicer_to_server(Measuring(), handlers)


async def ask(pair, request, **options):
    stub = prefill_pb2_grpc.PrefillServiceStub(pair.channel)
    return [response async for response in stub.Prefill(request, **options)]


async def test_a_tensor_does_not_fit_into_a_message(monkeypatch):
    async with rpc_pair(monkeypatch, [("epd.v1.PrefillService", add_measuring)]) as pair:
        await ask(pair, prefill_pb2.PrefillRequest(request_id="x" * (MESSAGE_BYTES - 100)))
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await ask(pair, prefill_pb2.PrefillRequest(request_id="x" * MESSAGE_BYTES))
    assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED


class Busy(prefill_pb2_grpc.PrefillServiceServicer):
    async def Prefill(self, request, context):
        if request.request_id == "block":
            time.sleep(1.5)  # noqa: ASYNC251
        yield prefill_pb2.PrefillResponse()


def add_busy(handlers):
    prefill_pb2_grpc.add_PrefillServiceServicer_to_server(Busy(), handlers)


@pytest.mark.parametrize("limit_s", [1, MAX_UNACCEPTED_S])
async def test_calls_that_a_busy_event_loop_takes_in_late_are_not_cancelled(monkeypatch, limit_s):
    """With a limit below the hold-up they are: the option is what decides."""
    monkeypatch.setattr("epd.rpc.options.MAX_UNACCEPTED_S", limit_s)
    names = ["block", *map(str, range(9))]
    requests = [prefill_pb2.PrefillRequest(request_id=name) for name in names]
    codes: set[grpc.StatusCode] = set()
    async with rpc_pair(monkeypatch, [("epd.v1.PrefillService", add_busy)]) as pair:
        for _ in range(1 if limit_s > 1 else 8):  # the hold-up may begin before the others are sent
            results = await asyncio.gather(
                *(ask(pair, request, timeout=60.0) for request in requests), return_exceptions=True
            )
            codes |= {one.code() for one in results if isinstance(one, grpc.aio.AioRpcError)}
            if codes:
                break
    assert codes == ({grpc.StatusCode.CANCELLED} if limit_s == 1 else set())


async def test_onward_calls_get_what_is_left_of_the_deadline(monkeypatch):
    async with rpc_pair(monkeypatch, [("epd.v1.PrefillService", add_measuring)]) as pair:
        began_s = time.monotonic()
        await ask(pair, prefill_pb2.PrefillRequest(), timeout=50)
        took_s = time.monotonic() - began_s
        assert 50 - took_s - 0.1 < Measuring.left_s < 50.5  # gRPC rounds a deadline up on its way
        await ask(pair, prefill_pb2.PrefillRequest(), timeout=500)
        assert Measuring.left_s == 60
        await ask(pair, prefill_pb2.PrefillRequest())
        assert Measuring.left_s == 60


def test_a_passed_deadline_is_an_error():
    late = mock.create_autospec(grpc.aio.ServicerContext, instance=True)
    late.time_remaining.return_value = -0.1
    with pytest.raises(DeadlineExceededError):
        remaining_s(late, 1.0)


async def test_a_peer_has_one_channel_and_the_number_of_peers_is_bounded():
    telemetry = start_telemetry("prefill", "i")
    pool = ChannelPool(telemetry, max_peers=2)
    first = pool.get("127.0.0.1:1")
    assert pool.get("127.0.0.1:1") is first
    pool.get("127.0.0.1:2")
    with pytest.raises(ResourceExhaustedError, match=r"no room for 127\.0\.0\.1:3"):
        pool.get("127.0.0.1:3")
    await pool.close("127.0.0.1:1")
    pool.get("127.0.0.1:3")
    await pool.close_all()
    assert len(pool) == 0
    telemetry.close()


async def test_a_channel_refuses_a_thing_that_is_no_address():
    telemetry = start_telemetry("prefill", "i")
    with pytest.raises(ConfigError, match="'decode' is not host:port"):
        open_channel("decode", telemetry)
    telemetry.close()


def test_addresses_are_split_and_joined():
    for host, port in (("127.0.0.1", 1), ("::1", 65535), ("decode", 50051)):
        assert split_address(join_address(host, port)) == (host, port)


@pytest.mark.parametrize(
    ("host", "loopback"),
    [("127.0.0.1", True), ("::1", True), ("localhost", True), ("0.0.0.0", False), ("::", False)],
)
def test_loopback_is_told_from_the_network(host, loopback):
    assert is_loopback(host) is loopback


async def test_a_pool_that_forgets_closes_the_peer_asked_for_the_longest_time_ago():
    telemetry = start_telemetry("prefill", "prefill-1")
    pool = ChannelPool(telemetry, max_peers=2, forgets=True)
    try:
        first, second = pool.get("127.0.0.1:1"), pool.get("127.0.0.1:2")
        assert pool.get("127.0.0.1:1") is first
        for port in range(3, 1100):
            pool.get(f"127.0.0.1:{port}")
            pool.get("127.0.0.1:1")
        assert len(pool) == 2
        assert pool.get("127.0.0.1:1") is first
        assert pool.get("127.0.0.1:2") is not second
    finally:
        await pool.close_all()
        telemetry.close()
