"""A router in this process, on a real socket, in front of fake workers."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import pytest

from epd.config import resolve
from epd.rpc.options import IMAGE_MESSAGE_BYTES, channel_options
from epd.rpc.request_context import new_id
from epd.rpc.server import GrpcServer
from epd.rpc.server_interceptors import server_interceptors
from epd.rpc.service import ServiceContext
from epd.telemetry.setup import Telemetry, start_telemetry
from epd.v1 import common_pb2, router_pb2
from epd.v1.router_pb2_grpc import RouterServiceStub
from services.router.__main__ import SERVICE
from services.router.application import application
from services.router.config import RouterConfig
from tests.router.fake_workers import FakeDecode, FakeEncoder, FakePrefill, FakeWorker, answer_token
from tests.support.answer import collect

#: Quick reactions, so that tests need not wait; patience where one that runs out because this
#: process stands still for some seconds would change the outcome.
FAST = {
    "worker-wait-s": "30",
    "worker-patience-s": "0.3",
    "worker-backoff-s": "0.02",
    "worker-max-backoff-s": "0.1",
    "worker-silence-s": "10",
    "drain-notice-s": "0",
    "drain-grace-s": "0",
    "retry-backoff-s": "0.01",
    "discovery-period-s": "0.05",
    "control-timeout-s": "30",
    "prefill-linger-s": "30",
}


@dataclass(frozen=True)
class RunningRouter:
    """The router and a stub to it."""

    address: str
    stub: RouterServiceStub
    telemetry: Telemetry
    server: GrpcServer
    http: str = ""


@contextlib.asynccontextmanager
async def running(*workers: FakeWorker) -> AsyncIterator[None]:
    """Starts workers and stops them at the end."""
    async with contextlib.AsyncExitStack() as stack:
        for worker in workers:
            await worker.start()
            stack.push_async_callback(worker.stop)
        yield


@contextlib.asynccontextmanager
async def router(
    model: Path, workers: Sequence[FakeWorker], **settings: str
) -> AsyncIterator[RunningRouter]:
    """A router that knows the workers by address; settings are flags without dashes."""
    flags = {
        "model": str(model),
        "encoders": _addresses(workers, FakeEncoder),
        "prefills": _addresses(workers, FakePrefill),
        "decodes": _addresses(workers, FakeDecode),
        "metrics-port": "-1",
        **FAST,
        **{name.replace("_", "-"): value for name, value in settings.items()},
    }
    config = resolve(RouterConfig, [f"--{name}={value}" for name, value in flags.items()], {})
    telemetry = start_telemetry("router", new_id(), metrics_port=config.metrics_port)
    server = GrpcServer(
        config,
        SERVICE.service_names,
        server_interceptors(telemetry, starts_traces=True),
        SERVICE.message_bytes,
    )
    await server.start()
    try:
        context = ServiceContext("router", new_id(), server, telemetry)
        async with application(config, context):
            await server.set_serving()
            options = channel_options(IMAGE_MESSAGE_BYTES)
            async with grpc.aio.insecure_channel(server.address, options=options) as channel:
                yield RunningRouter(
                    server.address,
                    RouterServiceStub(channel),
                    telemetry,
                    server,
                    context.addresses.get("http", ""),
                )
    finally:
        await server.stop()
        telemetry.close()


def request(
    text: str = "hello",
    images: Sequence[bytes] = (),
    *,
    seed: int = 0,
    max_tokens: int = 8,
    **fields: Any,
) -> router_pb2.GenerateRequest:
    """A conversation of one message, images first."""
    parts = [router_pb2.ContentPart(image=data) for data in images]
    parts.append(router_pb2.ContentPart(text=text))
    return router_pb2.GenerateRequest(
        conversation=router_pb2.Conversation(
            messages=[router_pb2.ChatMessage(role="user", parts=parts)]
        ),
        sampling=common_pb2.SamplingParams(seed=seed, max_tokens=max_tokens),
        **fields,
    )


async def all_leave(served: RunningRouter, workers: Sequence[FakeWorker]) -> None:
    """The workers turn unhealthy; returns once the router knows of none that serves."""
    for worker in workers:
        await worker.set_health(False)
    async with asyncio.timeout(15):
        while (await served.stub.GetModel(router_pb2.GetModelRequest())).model_name:
            await asyncio.sleep(0.01)


async def failure(call: Any) -> grpc.aio.AioRpcError:
    """The status that a stream ends with, which must not be OK."""
    with pytest.raises(grpc.aio.AioRpcError) as raised:
        await collect(call)
    return raised.value


async def eventually(condition: Callable[[], bool], within_s: float = 15.0) -> None:
    """Waits for a state that must come; the bound is for a machine that is busy elsewhere."""
    async with asyncio.timeout(within_s):
        while not condition():
            await asyncio.sleep(0.005)


async def lapse(seconds: float) -> None:
    """Lets time pass in which something would happen.

    In slices: while this process stands still nothing can happen, and that counts as one of them.
    """
    for _ in range(20):
        await asyncio.sleep(seconds / 20)


async def load_is_read(*workers: FakeWorker) -> None:
    """Waits until the router has read what these workers report now.

    Each sends its next report some time after the one before has gone out, and all that is read and
    sent here goes through one event loop.
    """
    before = [worker.reports for worker in workers]
    await eventually(
        lambda: all(
            worker.reports >= seen + 4 for worker, seen in zip(workers, before, strict=True)
        )
    )


def answer_of(seed: int, length: int) -> list[int]:
    """The first tokens of the fakes' answer."""
    return [answer_token(seed, position) for position in range(length)]


def _addresses(workers: Sequence[FakeWorker], kind: type[FakeWorker]) -> str:
    return ",".join(worker.address for worker in workers if isinstance(worker, kind))
