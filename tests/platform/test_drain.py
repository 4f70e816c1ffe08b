"""What a server that drains still answers, what it refuses and when it ends."""

import asyncio
import contextlib
import time

import grpc
import pytest

from epd.errors import UnavailableError
from epd.rpc.server_config import ServerConfig
from epd.rpc.status import error_from_rpc
from epd.v1 import encoder_pb2, encoder_pb2_grpc, prefill_pb2, prefill_pb2_grpc
from tests.support.rpc_pair import rpc_pair

#: A drain that lasted so long would be one that waited for its end.
GRACE_S = 300.0


class Prefill(prefill_pb2_grpc.PrefillServiceServicer):
    """One response, another when the test says so."""

    def __init__(self):
        self.go = asyncio.Event()

    async def Prefill(self, request, context):
        yield prefill_pb2.PrefillResponse()
        await self.go.wait()
        yield prefill_pb2.PrefillResponse()


class Encoder(encoder_pb2_grpc.EncoderServiceServicer):
    """Renews."""

    async def Renew(self, request, context):
        return encoder_pb2.EncoderServiceRenewResponse()


@pytest.fixture
async def served(monkeypatch):
    prefill = Prefill()
    services = [
        (
            "epd.v1.PrefillService",
            lambda server: prefill_pb2_grpc.add_PrefillServiceServicer_to_server(prefill, server),
        ),
        (
            "epd.v1.EncoderService",
            lambda server: encoder_pb2_grpc.add_EncoderServiceServicer_to_server(Encoder(), server),
        ),
    ]
    config = ServerConfig(drain_notice_s=0, drain_grace_s=GRACE_S)
    async with rpc_pair(monkeypatch, services, config=config) as pair:
        yield pair, prefill
        prefill.go.set()


async def test_running_requests_end_with_the_calls_they_need_while_new_ones_are_refused(served):
    pair, prefill = served
    stub = prefill_pb2_grpc.PrefillServiceStub(pair.channel)
    running = stub.Prefill(prefill_pb2.PrefillRequest())
    await running.read()
    began = time.monotonic()
    stopping = asyncio.create_task(pair.server.stop())
    while pair.server._calls._no_work is None:
        await asyncio.sleep(0.001)
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await stub.Prefill(prefill_pb2.PrefillRequest()).read()
    refusal = error_from_rpc(caught.value)
    assert isinstance(refusal, UnavailableError)
    assert refusal.reason == "DRAINING"
    encoder = encoder_pb2_grpc.EncoderServiceStub(pair.channel)
    assert await encoder.Renew(encoder_pb2.EncoderServiceRenewRequest()) is not None
    assert not stopping.done()
    prefill.go.set()
    assert len([response async for response in running]) == 1
    await stopping
    assert time.monotonic() - began < GRACE_S / 2


async def test_a_drain_lasts_while_somebody_is_in_need_outside_of_calls(served):
    pair, _ = served
    needed = [True]
    pair.server.stay_while(lambda: needed[0])
    stopping = asyncio.create_task(pair.server.stop())
    with contextlib.suppress(TimeoutError):
        await asyncio.wait_for(asyncio.shield(stopping), 0.5)
    assert not stopping.done()
    needed.clear()
    needed.append(False)
    async with asyncio.timeout(GRACE_S / 2):
        await stopping
