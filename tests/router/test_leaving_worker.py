"""A worker that leaves the discovery set takes no new calls; those that run may end."""

import asyncio

import pytest

from epd.cleanup import CleanupTasks
from epd.errors import UnavailableError
from epd.rpc.channels import ChannelPool
from epd.rpc.request_context import new_id
from epd.telemetry.setup import start_telemetry
from services.router.deadline import Deadline
from services.router.encode_stage import EncodedImages, encode
from services.router.handles import HandleSet
from services.router.leg import WORKER_LOST, LegFailedError
from services.router.prompt import SourceImage
from services.router.worker_info import info_from_proto
from services.router.worker_maker import BreakerBounds, CacheView, WorkerMaker
from services.router.workers import Role
from tests.router.fake_workers import FakeEncoder
from tests.router.harness import eventually, running

MAKER = WorkerMaker(
    CacheView(events=False, blocks=100, bridge_s=1.0, assumed_s=1.0), BreakerBounds(5, 1.0)
)


async def test_images_at_an_encoder_that_leaves_before_a_lease_is_renewed_are_sent_elsewhere(
    caplog: pytest.LogCaptureFixture,
) -> None:
    fake = FakeEncoder()
    fake.lease_ms = 300
    fake.ready_when = lambda: False
    telemetry = start_telemetry("router", new_id())
    channels, cleanup = ChannelPool(telemetry), CleanupTasks()
    async with running(fake), asyncio.timeout(30):
        channel = channels.get(fake.address)
        worker = MAKER.worker(Role.ENCODER, fake.address, info_from_proto(fake.info), channel)
        handles = HandleSet(cleanup, rpc_timeout_s=5.0)
        image = SourceImage(0, b"image", b"d" * 32, 1)
        encoding = asyncio.create_task(
            encode("r", [(worker, [image])], handles, Deadline(20.0), EncodedImages(1))
        )
        await eventually(lambda: bool(fake.seen))
        leaving = asyncio.create_task(channels.close(fake.address, grace_s=10.0))
        with pytest.raises(LegFailedError) as failed:
            await encoding
        # A lost worker's: the router tries again elsewhere.
        assert isinstance(failed.value.error, UnavailableError)
        assert failed.value.error.reason == WORKER_LOST
        handles.release(settled=True)
        await cleanup.drain(10.0)
        await leaving
    telemetry.close()
    assert "clean-up failed" not in caplog.text
