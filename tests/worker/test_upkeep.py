"""A worker with a dead engine, data plane or upkeep says so while its gRPC server answers."""

import asyncio
import contextlib

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from epd.rpc.server import GrpcServer
from epd.rpc.server_config import ServerConfig
from epd.transfer.agent import TransferAgent
from epd.transfer.faults import Faults
from epd.transfer.faulty_backend import FaultyBackend
from epd.transfer.local_backend import LocalBackend, LocalFabric
from epd.worker.upkeep import Upkeep

SERVICE = "epd.v1.DecodeService"


@contextlib.asynccontextmanager
async def serving():
    """A server that is SERVING, its upkeep, and how to wait until health says otherwise."""
    server = GrpcServer(ServerConfig(drain_notice_s=0, drain_grace_s=0), [SERVICE])
    await server.start()
    await server.set_serving()
    async with grpc.aio.insecure_channel(server.address) as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        request = health_pb2.HealthCheckRequest(service=SERVICE)

        async def not_serving():
            async with asyncio.timeout(30):
                async for status in stub.Watch(request):
                    if status.status == health_pb2.HealthCheckResponse.NOT_SERVING:
                        return

        assert (await stub.Check(request)).status == health_pb2.HealthCheckResponse.SERVING
        async with Upkeep(server) as upkeep:
            yield server, upkeep, not_serving
    await server.stop()


async def test_a_dead_transfer_thread_turns_health_to_not_serving_and_names_the_cause():
    faults = Faults()
    async with serving() as (server, upkeep, not_serving):
        agent = TransferAgent(lambda: FaultyBackend(LocalBackend("a", "i", LocalFabric()), faults))
        agent.on_death(upkeep.thread_death("the transfer agent"))
        agent.start()
        faults.die = RuntimeError("the library is gone")
        await not_serving()
        assert "the library is gone" in server.failure
        assert not agent.alive


async def test_a_background_task_that_fails_or_ends_turns_health_to_not_serving():
    async def fails():
        await asyncio.sleep(0.05)
        raise KeyError("no such lease")

    async def ends():
        await asyncio.sleep(0.05)

    for work, cause in ((fails, "no such lease"), (ends, "it ended")):
        async with serving() as (server, upkeep, not_serving):
            upkeep.run("the KV receiver", work())
            await not_serving()
            assert "the KV receiver died" in server.failure
            assert cause in server.failure


async def test_leaving_cancels_the_tasks_and_health_stays():
    cancelled = asyncio.Event()

    async def forever():
        try:
            await asyncio.sleep(3600)
        finally:
            cancelled.set()

    async with serving() as (server, upkeep, _):
        upkeep.run("pairing", forever())
        await asyncio.sleep(0)
    assert cancelled.is_set()
    assert server.failure == ""


@pytest.mark.parametrize("name", ["the engine", "the encoder"])
async def test_the_first_cause_is_kept(name):
    async with serving() as (server, upkeep, not_serving):
        for number in (1, 2):
            await asyncio.to_thread(upkeep.thread_death(name), RuntimeError(f"cause {number}"))
        await not_serving()
        assert "cause 1" in server.failure
