"""What a worker tells about itself."""

import asyncio
import time

import grpc
import pytest

from epd.rpc.worker_service import WorkerServicer
from epd.v1 import worker_pb2, worker_pb2_grpc
from tests.support.rpc_pair import rpc_pair

HEARTBEAT_S = 0.25


class Worker:
    def __init__(self, kv_events=None, heartbeat_s=HEARTBEAT_S):
        self.running = 0
        self.servicer = WorkerServicer(
            lambda: worker_pb2.GetInfoResponse(instance_id="i", model_name="m"),
            lambda: worker_pb2.WatchLoadResponse(instance_id="i", running_requests=self.running),
            heartbeat_s=heartbeat_s,
            kv_events=kv_events,
        )

    def add(self, handlers):
        worker_pb2_grpc.add_WorkerServiceServicer_to_server(self.servicer, handlers)


def serve(monkeypatch, worker):
    return rpc_pair(monkeypatch, [("epd.v1.WorkerService", worker.add)])


async def test_load_comes_at_once_then_every_heartbeat(monkeypatch):
    worker = Worker()
    async with serve(monkeypatch, worker) as pair:
        stub = worker_pb2_grpc.WorkerServiceStub(pair.channel)
        watch = stub.WatchLoad(worker_pb2.WatchLoadRequest(), timeout=30)
        began = time.monotonic()
        reports = [await watch.read() for _ in range(3)]
        took_s = time.monotonic() - began
        watch.cancel()
    assert [report.sequence for report in reports] == [1, 2, 3]
    assert took_s > HEARTBEAT_S * 1.8


async def test_a_change_is_told_before_the_heartbeat(monkeypatch):
    worker = Worker(heartbeat_s=3600)
    async with serve(monkeypatch, worker) as pair:
        stub = worker_pb2_grpc.WorkerServiceStub(pair.channel)
        watch = stub.WatchLoad(worker_pb2.WatchLoadRequest(), timeout=30)
        await watch.read()
        await asyncio.sleep(0.05)
        worker.running = 4
        worker.servicer.load_changed()
        report = await watch.read()
        watch.cancel()
    assert report.running_requests == 4


async def test_a_change_that_nobody_announces_is_found_before_the_heartbeat(monkeypatch):
    worker = Worker(heartbeat_s=3600)
    async with serve(monkeypatch, worker) as pair:
        stub = worker_pb2_grpc.WorkerServiceStub(pair.channel)
        watch = stub.WatchLoad(worker_pb2.WatchLoadRequest(), timeout=30)
        await watch.read()
        worker.running = 4
        report = await watch.read()
        watch.cancel()
    assert report.running_requests == 4


async def test_a_watcher_that_left_is_forgotten(monkeypatch):
    worker = Worker()
    async with serve(monkeypatch, worker) as pair:
        stub = worker_pb2_grpc.WorkerServiceStub(pair.channel)
        watch = stub.WatchLoad(worker_pb2.WatchLoadRequest(), timeout=30)
        await watch.read()
        assert len(worker.servicer._watchers) == 1
        watch.cancel()
        async with asyncio.timeout(20):
            while worker.servicer._watchers:
                await asyncio.sleep(0.01)


async def test_cache_events_come_from_the_worker_or_are_unimplemented(monkeypatch):
    async def events():
        yield worker_pb2.WatchKvEventsResponse(instance_id="i", stored_hashes=[b"h"])

    async with serve(monkeypatch, Worker(events)) as pair:
        stub = worker_pb2_grpc.WorkerServiceStub(pair.channel)
        watch = stub.WatchKvEvents(worker_pb2.WatchKvEventsRequest(), timeout=30)
        assert [event.stored_hashes async for event in watch] == [[b"h"]]
        assert (await stub.GetInfo(worker_pb2.GetInfoRequest())).model_name == "m"
    async with serve(monkeypatch, Worker()) as pair:
        stub = worker_pb2_grpc.WorkerServiceStub(pair.channel)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await stub.WatchKvEvents(worker_pb2.WatchKvEventsRequest(), timeout=30).read()
        assert caught.value.code() is grpc.StatusCode.UNIMPLEMENTED
