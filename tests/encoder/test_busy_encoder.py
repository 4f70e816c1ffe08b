"""An encoder whose vision tower has more than it may hold: alive, and quick to say no."""

import asyncio
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from bench.vision_model import Tower, make_vision_model
from epd.encoding.encoding_config import EncodingConfig
from epd.engine.families.registry import load_family
from epd.engine.model_digest import model_digest
from epd.errors import ResourceExhaustedError
from epd.fleet.process import ServiceProcess
from epd.rpc.channels import ChannelPool
from epd.rpc.discovery import Discovery
from epd.rpc.options import IMAGE_MESSAGE_BYTES
from epd.rpc.request_context import new_id
from epd.telemetry.setup import start_telemetry
from epd.v1 import worker_pb2
from services.router.registry import WorkerRegistry
from services.router.worker_maker import BreakerBounds, CacheView, WorkerMaker
from services.router.worker_watch import WatchTimings
from services.router.workers import Role
from tests.encoder.calls import Caller
from tests.encoder.pictures import encoded, picture
from tests.encoder.test_service import Client, start_encoder

#: Images the encoder takes; each is a forward pass of its own and takes some tenths of a second.
PENDING = 12
TOWER = Tower(depth=8, image_side=392)
#: A router's defaults, but for a machine where a process may be held up for seconds.
TIMINGS = WatchTimings(silence_s=10.0, backoff_s=0.1, max_backoff_s=1.0, leave_grace_s=5.0)


@pytest.fixture(scope="module")
def slow_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_vision_model(tmp_path_factory.mktemp("slow-vl"), TOWER)


@pytest.fixture(scope="module")
def service(slow_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServiceProcess]:
    flags = (f"--max-pending-images={PENDING}", "--max-batch=1")
    process = start_encoder(slow_model, tmp_path_factory.mktemp("logs"), *flags)
    yield process
    process.kill()


@pytest.fixture
async def client(service: ServiceProcess, slow_model: Path) -> AsyncIterator[Client]:
    digest = EncodingConfig().processor_digest(load_family(slow_model))
    client = Client(service.address, Caller(digest, model_digest(slow_model)))
    yield client
    await client.channel.close(None)


@asynccontextmanager
async def watching(service: ServiceProcess) -> AsyncIterator[WorkerRegistry]:
    """A router's view of the encoder."""
    telemetry = start_telemetry("router", new_id())
    pool = ChannelPool(telemetry, message_bytes=IMAGE_MESSAGE_BYTES)
    view = CacheView(events=True, blocks=100, bridge_s=1.0, assumed_s=1.0)
    registry = WorkerRegistry(
        {Role.ENCODER: Discovery([service.address])},
        {Role.ENCODER: pool},
        TIMINGS,
        WorkerMaker(view, BreakerBounds(5, 1.0)),
        model_name="m",
    )
    task = asyncio.create_task(registry.run())
    try:
        await registry.wait_until(lambda: bool(registry.available(Role.ENCODER)), 30)
        yield registry
    finally:
        task.cancel()
        await asyncio.wait([task])
        await pool.close_all()
        telemetry.close()


async def test_a_saturated_encoder_refuses_at_once_and_is_alive_to_everybody(
    client: Client, service: ServiceProcess
) -> None:
    """Times are compared with the time its queue takes: whatever waited behind it takes that.

    Two of some hundred may have met a moment in which the machine stood still.
    """
    files = [encoded(picture(TOWER.image_side, TOWER.image_side, n), "PNG") for n in range(99)]
    health = health_pb2_grpc.HealthStub(client.channel)
    probes: list[float] = []
    reasons: set[str] = set()
    async with watching(service) as registry:
        (worker,) = registry.available(Role.ENCODER)
        started_s = time.monotonic()
        backlog = asyncio.create_task(client.encode(*files[:PENDING]))
        while (await client.load()).open_transfers < PENDING:
            await asyncio.sleep(0.01)
        for number in range(PENDING, PENDING + 4):
            refused_s = time.monotonic()
            with pytest.raises(ResourceExhaustedError) as caught:
                await client.encode(files[number], *files[50:60])
            probes.append(time.monotonic() - refused_s)
            assert caught.value.reason == "QUEUE_FULL"
            assert caught.value.retry_after_s > 0
        while not backlog.done():
            asked_s = time.monotonic()
            answer = await health.Check(health_pb2.HealthCheckRequest(), timeout=60)
            assert answer.status == health_pb2.HealthCheckResponse.SERVING
            await client.worker.GetInfo(worker_pb2.GetInfoRequest(), timeout=60)
            await client.load()
            probes.append(time.monotonic() - asked_s)
            reasons |= {state.reason for state in registry.states()}
            await asyncio.sleep(0.02)
        backlog_s = time.monotonic() - started_s
        assert registry.available(Role.ENCODER) == [worker]  # the same one: it was never given up
        await client.release(await backlog)
    assert reasons == {""}
    assert sorted(probes)[-3] < backlog_s / 4
    assert sorted(probes)[len(probes) // 2] < backlog_s / PENDING
    # What was refused has left nothing behind, and there is room again.
    await client.release(await client.encode(files[PENDING]))
    await client.everything_comes_back()
