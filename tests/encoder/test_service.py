"""The encoder as a real process: gRPC in front, NIXL underneath."""

import asyncio
import io
import os
import secrets
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import psutil
import pytest
import torch
from PIL import Image
from transformers import AutoImageProcessor, Qwen2VLForConditionalGeneration

from epd.errors import EpdError, InvalidRequestError
from epd.fleet.process import FleetError, ServiceProcess
from epd.rpc.channels import open_channel
from epd.rpc.options import IMAGE_MESSAGE_BYTES
from epd.rpc.status import error_from_rpc
from epd.telemetry.otlp_receiver import OtlpReceiver
from epd.telemetry.prometheus import scrape
from epd.telemetry.span_store import SpanStore
from epd.transfer.buffer import HostBuffer
from epd.v1 import encoder_pb2, encoder_pb2_grpc, worker_pb2, worker_pb2_grpc
from epd.wire.media import media_fields
from epd.wire.timings import timings_from_proto
from epd.wire.transfer import agent_from_proto, segment_from_proto
from epd.worker.transfer_endpoint import open_endpoint
from tests.encoder.calls import Caller
from tests.encoder.pictures import encoded, picture
from tests.encoder.test_image_reader import BAD_FILES
from tests.support.tiny_model import make_tiny_llama

FLAGS = ("--follow-stdin", "--drain-notice-s=0.1", "--drain-grace-s=5")


def start_encoder(folder: Path, logs: Path, *flags: str, otlp: str = "") -> ServiceProcess:
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(sys.path),
        "OTEL_BSP_SCHEDULE_DELAY": "100",
        **({"OTEL_EXPORTER_OTLP_ENDPOINT": otlp} if otlp else {}),
    }
    command = [sys.executable, "-m", "services.encoder", f"--model={folder}", *FLAGS, *flags]
    process = ServiceProcess("encoder", "encoder", command, environment, logs)
    process.start()
    process.wait_ready(240)
    return process


@pytest.fixture(scope="module")
def spans() -> SpanStore:
    return SpanStore()


@pytest.fixture(scope="module")
def service(
    model_folder: Path, tmp_path_factory: pytest.TempPathFactory, spans: SpanStore
) -> Iterator[ServiceProcess]:
    with OtlpReceiver(spans) as receiver:
        logs = tmp_path_factory.mktemp("logs")
        process = start_encoder(model_folder, logs, otlp=receiver.endpoint)
        yield process
        process.kill()


class Client:
    """Calls the service; errors come back typed."""

    def __init__(self, address: str, caller: Caller) -> None:
        self._caller = caller
        self.channel = open_channel(address, message_bytes=IMAGE_MESSAGE_BYTES)
        self.encoder = encoder_pb2_grpc.EncoderServiceStub(self.channel)
        self.worker = worker_pb2_grpc.WorkerServiceStub(self.channel)

    def request(self, *files: bytes) -> encoder_pb2.EncodeRequest:
        images = [
            encoder_pb2.EncodeImage(
                image_index=one.image_index, digest=one.digest, **media_fields(one.data)
            )
            for one in self._caller.images(files)
        ]
        return encoder_pb2.EncodeRequest(request_id=secrets.token_hex(8), images=images)

    async def encode(
        self, *files: bytes, metadata: tuple[tuple[str, str], ...] = ()
    ) -> list[encoder_pb2.Planned]:
        planned, ready = {}, set()
        try:
            call = self.encoder.Encode(self.request(*files), timeout=60, metadata=metadata)
            async for response in call:
                if response.HasField("planned"):
                    planned[response.planned.image_index] = response.planned
                else:
                    ready.add(response.ready.image_index)
        except grpc.aio.AioRpcError as error:
            # Nobody was told of these handles, so no READ can run.
            if planned:
                await self.release(list(planned.values()))
            raise error_from_rpc(error) from error
        assert ready == planned.keys() == set(range(len(files)))
        return list(planned.values())

    async def read(self, planned: list[encoder_pb2.Planned]) -> None:
        """Announces READs, as a prefill worker does."""
        ids = [one.handle.handle_id for one in planned]
        request = encoder_pb2.EncoderServiceRenewRequest(handle_ids=ids, reading=True)
        assert not (await self.encoder.Renew(request)).unknown_handle_ids

    async def release(self, planned: list[encoder_pb2.Planned], *, settled: bool = True) -> None:
        ids = [one.handle.handle_id for one in planned]
        await self.encoder.Release(encoder_pb2.ReleaseRequest(handle_ids=ids, settled=settled))

    async def load(self) -> worker_pb2.WatchLoadResponse:
        watch = self.worker.WatchLoad(worker_pb2.WatchLoadRequest())
        try:
            return await anext(aiter(watch))
        finally:
            watch.cancel()

    async def everything_comes_back(self) -> None:
        """A forward pass outlives the call that is gone, so it takes a moment."""
        deadline = time.monotonic() + 20  # a lease that had to run out would take a minute
        while time.monotonic() < deadline:
            load = await self.load()
            held = load.total_embedding_bytes - load.free_embedding_bytes
            left = (load.open_transfers, load.running_requests, load.waiting_requests, held)
            if not any(left):
                return
            await asyncio.sleep(0.02)
        pytest.fail(f"still transfers, running, waiting, bytes: {left}")


@pytest.fixture
async def client(service: ServiceProcess, caller: Caller):
    client = Client(service.address, caller)
    yield client
    await client.channel.close(None)


async def test_embedding_read_over_nixl_equals_the_whole_model(
    client: Client, model_folder: Path
) -> None:
    one = picture(200, 150, seed=7)
    (planned,) = await client.encode(encoded(one, "JPEG", quality=95))
    handle = planned.handle
    buffer = HostBuffer(handle.byte_count)
    agent = open_endpoint(("nixl",), "test", secrets.token_hex(16), [(buffer.segment, "DRAM")])
    try:
        peer = agent_from_proto(handle.agents[0])
        agent.connect(peer).result(60)
        remote = [segment_from_proto(segment) for segment in handle.segments]
        agent.read(peer.agent_name, [buffer.part(0, handle.byte_count)], remote).result(60)
    finally:
        agent.stop()
    await client.release([planned])
    got = torch.from_numpy(buffer.view().view(np.float32).reshape(tuple(handle.shape)))

    model = Qwen2VLForConditionalGeneration.from_pretrained(model_folder).eval()
    processor = AutoImageProcessor.from_pretrained(model_folder)
    decoded = Image.open(io.BytesIO(encoded(one, "JPEG", quality=95)))
    inputs = processor(images=[decoded], return_tensors="pt")
    with torch.no_grad():
        expected = model.get_image_features(**inputs).pooler_output[0]
    torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-5)
    assert len(planned.placeholder_ids) == expected.shape[0]


@pytest.mark.parametrize(("data", "reason"), BAD_FILES.values(), ids=BAD_FILES.keys())
async def test_every_bad_image_is_an_invalid_argument_and_the_service_lives_on(
    client: Client, service: ServiceProcess, data: bytes, reason: str
) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        await client.encode(encoded(picture(), "PNG"), data)
    assert caught.value.field == "images[1]"
    assert caught.value.reason == reason
    assert service.running
    await client.everything_comes_back()


async def test_worker_tells_what_it_is(client: Client, service: ServiceProcess) -> None:
    info = await client.worker.GetInfo(worker_pb2.GetInfoRequest())
    assert info.role == worker_pb2.WORKER_ROLE_ENCODER
    assert info.accepts_images
    assert info.agents[0].instance_id == info.instance_id
    assert info.processor_digest
    assert info.metrics_address == service.metrics_address
    assert not info.HasField("kv_layout")


async def test_only_the_vision_half_is_held(service: ServiceProcess, model_folder: Path) -> None:
    whole = Qwen2VLForConditionalGeneration.from_pretrained(model_folder)
    vision = sum(parameter.numel() for parameter in whole.model.visual.parameters())
    metrics = scrape(service.metrics_address)
    names = {name for name, _, _ in metrics.samples if "model_parameter" in name}
    assert [metrics.total(name) for name in names] == [vision]


async def test_no_tensor_is_in_any_message(client: Client) -> None:
    largest = 0
    call = client.encoder.Encode(client.request(encoded(picture(168, 168, 31), "PNG")))
    async for response in call:
        largest = max(largest, response.ByteSize())
        if response.HasField("planned"):
            planned = response.planned
    await client.release([planned])
    assert planned.handle.byte_count > 10_000
    assert largest < 4_000


async def test_metrics_and_load_tell_what_was_done(client: Client, service: ServiceProcess) -> None:
    data = encoded(picture(112, 112, seed=99), "PNG")
    before = scrape(service.metrics_address)
    planned = [*await client.encode(data), *await client.encode(data)]
    assert [one.cache_hit for one in planned] == [False, True]
    assert (await client.load()).open_transfers == 2
    during = scrape(service.metrics_address)

    def grew(name: str) -> float:
        return during.total(name) - before.total(name)

    assert grew("epd_embedding_cache_query_total") == 2
    assert grew("epd_embedding_cache_hit_total") == 1
    assert grew("epd_encoder_forward_total") == 1
    assert grew("epd_encoder_patch_total") == 64
    await client.release(planned[:1])
    await client.read(planned[1:])
    await client.release(planned[1:], settled=False)
    load = await client.load()
    assert load.quarantined_embedding_bytes == planned[1].handle.byte_count
    await client.release(planned[1:])
    load = await client.load()
    assert (load.open_transfers, load.quarantined_embedding_bytes) == (0, 0)
    assert load.free_embedding_bytes == load.total_embedding_bytes


async def test_spans_hang_under_the_call_and_hits_have_none(
    client: Client, spans: SpanStore
) -> None:
    async def traced(data: bytes, flags: str) -> str:
        trace_id = secrets.token_hex(16)
        parent = f"00-{trace_id}-{secrets.token_hex(8)}-{flags}"
        await client.release(await client.encode(data, metadata=(("traceparent", parent),)))
        return trace_id

    async def arrived(trace_id: str) -> list[Any]:
        """The spans once the server's, which ends last, is among them."""
        async with asyncio.timeout(30):
            while not any(one.kind == "SERVER" for one in spans.spans(trace_id)):
                await asyncio.sleep(0.05)
        return spans.spans(trace_id)

    data = encoded(picture(112, 112, seed=77), "PNG")
    first = await arrived(await traced(data, "01"))
    (server,) = [one for one in first if one.kind == "SERVER"]
    assert server.name == "epd.v1.EncoderService/Encode"
    children = {one.name: one for one in first if one.parent_id == server.span_id}
    assert children.keys() == {"preprocess", "encode"}
    assert all(server.start_ns <= one.start_ns for one in children.values())
    unsampled = await traced(encoded(picture(112, 112, seed=78), "PNG"), "00")
    assert [one.kind for one in await arrived(await traced(data, "01"))] == ["SERVER"]
    assert spans.spans(unsampled) == []


async def test_told_stages_lie_within_the_call_and_reach_to_their_message(client: Client) -> None:
    files = [encoded(picture(112, 112, seed), "PNG") for seed in (61, 62)]
    for made in ({"queue", "preprocess", "encode"}, set()):
        planned, sent = [], []
        async for response in client.encoder.Encode(client.request(*files)):
            if response.HasField("planned"):
                planned.append(response.planned)
            else:
                sent.append(response.ready)
        for ready in sent:
            stages = timings_from_proto(ready.timings)
            assert stages.keys() == {"plan", "deliver", *made}
            assert 0 < sum(stages.values()) <= ready.service_ns
        # Both are in place when the call of hits is planned: the second waits for the first.
        delivered = [timings_from_proto(ready.timings)["deliver"] for ready in sent]
        assert made or delivered[0] < delivered[1]
        await client.release(planned)


async def test_cancelled_call_leaves_nothing(client: Client) -> None:
    files = [encoded(picture(1200, 900, 50 + n), "BMP") for n in range(6)]
    call = client.encoder.Encode(client.request(*files))
    await anext(aiter(call))
    call.cancel()
    await client.everything_comes_back()


async def test_renew_and_release_name_unknown_handles(client: Client) -> None:
    renewed = await client.encoder.Renew(
        encoder_pb2.EncoderServiceRenewRequest(handle_ids=["of an earlier start"])
    )
    released = await client.encoder.Release(encoder_pb2.ReleaseRequest(handle_ids=["nobody's"]))
    assert list(renewed.unknown_handle_ids) == ["of an earlier start"]
    assert list(released.unknown_handle_ids) == ["nobody's"]


async def test_sigterm_lets_running_calls_end_and_takes_no_new_ones(
    model_folder: Path, tmp_path: Path, caller: Caller
) -> None:
    service = start_encoder(model_folder, tmp_path, "--drain-grace-s=600")
    children = psutil.Process(service.pid).children(recursive=True)
    client = Client(service.address, caller)
    try:
        running = asyncio.create_task(
            client.encode(*(encoded(picture(900, 700, seed), "PNG") for seed in range(8)))
        )
        async with asyncio.timeout(30):
            while not (await client.load()).open_transfers:
                await asyncio.sleep(0.02)
        service.send_signal(signal.SIGTERM)
        planned = await running
        assert len(planned) == 8
        await client.release(planned)  # nobody will read them, so it does not stay for that
        assert await asyncio.to_thread(service.wait, 90) == 0
        with pytest.raises(EpdError):
            await client.encode(encoded(picture(), "PNG"))
        _, alive = psutil.wait_procs(children, timeout=30)
        assert not alive
    finally:
        await client.channel.close(None)
        service.kill()


def test_a_model_without_images_is_refused_in_one_line(tmp_path: Path) -> None:
    folder = make_tiny_llama(tmp_path / "llama")
    with pytest.raises(FleetError, match=r"status 1: encoder: .* takes no images"):
        start_encoder(folder, tmp_path)
