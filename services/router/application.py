"""Runs a router: its faces to clients and what it does in the background."""

import asyncio
import contextlib
from collections.abc import AsyncIterator

from epd.cleanup import cancel_and_wait
from epd.rpc.service import ServiceContext
from epd.v1 import router_pb2_grpc
from services.router.api_keys import ApiKeys
from services.router.assembly import Assembly, assemble
from services.router.config import HTTP_OFF, RouterConfig
from services.router.fleet_setup import make_channels, make_registry
from services.router.http.body import BodyReader
from services.router.http.endpoints import HttpParts, http_app
from services.router.http.server import HttpServer
from services.router.kserve.servicer import KserveServicer
from services.router.registry import WorkerRegistry
from services.router.servicer import RouterServicer


@contextlib.asynccontextmanager
async def application(config: RouterConfig, context: ServiceContext) -> AsyncIterator[None]:
    """Serves while entered.

    Raises:
        ConfigError: the model folder lacks a file, or a setting contradicts another.
    """
    channels = make_channels(context)
    registry = make_registry(config, channels)
    made = assemble(config, context, registry)
    keys = ApiKeys.load(config.api_keys, config.api_keys_file)
    _add_grpc_faces(config, context, made, registry, keys)
    watching = asyncio.create_task(_watch(registry, context))
    parts = _http_parts(config, context, made, registry, keys)
    try:
        async with _http_face(config, context, parts):
            # Where one way suffices, the other must not be overlooked because it answered later.
            await registry.wait_until(
                lambda: made.routes.complete() and registry.settled, config.fleet.worker_wait_s
            )
            yield
    finally:
        await made.close(config.requests.control_timeout_s)
        await cancel_and_wait(watching)
        for pool in channels.values():
            await pool.close_all()


def _add_grpc_faces(
    config: RouterConfig,
    context: ServiceContext,
    made: Assembly,
    registry: WorkerRegistry,
    keys: ApiKeys,
) -> None:
    timeout_s = config.requests.request_timeout_s
    servicer = RouterServicer(made.router, registry, made.limits, keys, timeout_s)
    router_pb2_grpc.add_RouterServiceServicer_to_server(servicer, context.server.handlers)
    if config.kserve.kserve:
        kserve = KserveServicer(
            made.router,
            registry,
            made.routes.complete,
            context.server,
            keys,
            timeout_s,
            config.kserve.kserve_stream_requests,
        )
        context.server.handlers.add_generic_rpc_handlers([kserve.handler()])


@contextlib.asynccontextmanager
async def _http_face(
    config: RouterConfig, context: ServiceContext, parts: HttpParts
) -> AsyncIterator[None]:
    """Serves HTTP while entered, where it is on; on leaving waits until it is drained."""
    if config.http.http_port == HTTP_OFF:
        yield
        return
    server = HttpServer(http_app(parts), context.server, config, config.http, context.tls)
    context.addresses["http"] = server.address
    serving = asyncio.create_task(_serve_http(server, context))
    try:
        yield
        server.close()
        await serving
    finally:
        await cancel_and_wait(serving)


async def _serve_http(server: HttpServer, context: ServiceContext) -> None:
    try:
        await server.run()
    except Exception as error:
        await context.server.fail(f"the HTTP server ended: {error!r}")
        raise


async def _watch(registry: WorkerRegistry, context: ServiceContext) -> None:
    try:
        await registry.run()
    except Exception as error:
        # A router that cannot see its workers any more must not look healthy.
        await context.server.fail(f"worker watch ended: {error!r}")
        raise


def _http_parts(
    config: RouterConfig,
    context: ServiceContext,
    made: Assembly,
    registry: WorkerRegistry,
    keys: ApiKeys,
) -> HttpParts:
    http = config.http
    return HttpParts(
        router=made.router,
        registry=registry,
        has_route=made.routes.complete,
        server=context.server,
        telemetry=context.telemetry,
        token_bytes=made.tokenizer.token_bytes,
        bodies=BodyReader(
            http.http_body_bytes, http.http_live_body_bytes, http.http_body_timeout_s
        ),
        keys=keys,
        max_prompts=http.http_max_prompts,
        max_choices=http.http_max_choices,
        max_video_frames=config.requests.max_video_frames,
        tool_parser=http.tool_parser,
        request_timeout_s=config.requests.request_timeout_s,
        send_timeout_s=http.http_send_timeout_s,
    )
