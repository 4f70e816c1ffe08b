"""Builds a router from its settings and runs what it runs in the background."""

import asyncio
import contextlib
import random
from collections.abc import AsyncIterator

from epd.cleanup import CleanupTasks, cancel_and_wait
from epd.config import ConfigError
from epd.rpc.channels import ChannelPool
from epd.rpc.credentials import refuse_plain_text_peers
from epd.rpc.discovery import Discovery
from epd.rpc.options import IMAGE_MESSAGE_BYTES, MESSAGE_BYTES
from epd.rpc.service import ServiceContext
from epd.telemetry import semconv
from epd.telemetry.genai_metrics import GenAiMetrics
from epd.telemetry.metrics import counter, observe
from epd.text.chat_template import ChatTemplate
from epd.text.model_facts import ModelFacts
from epd.text.tokenizer import Tokenizer
from epd.v1 import router_pb2_grpc
from services.router.admission import Admission
from services.router.anchor_tokens import AnchorTokens
from services.router.api_keys import ApiKeys
from services.router.config import HTTP_OFF, FleetConfig, PrefixConfig, RouterConfig
from services.router.dispatcher import Dispatcher, DispatchTimings
from services.router.encoder_placement import EncoderPlacement
from services.router.exploration import Exploration
from services.router.http.body import BodyReader
from services.router.http.endpoints import HttpParts, http_app
from services.router.http.server import HttpServer
from services.router.image_urls.downloads import Downloads
from services.router.image_urls.url_images import UrlImages
from services.router.kserve.servicer import KserveServicer
from services.router.limits import RequestLimits
from services.router.placement import Placer
from services.router.prompt import PromptBuilder
from services.router.registry import WorkerRegistry
from services.router.retry import RetryPolicy
from services.router.retry_budget import RetryBudget
from services.router.router import Router, RouterParts
from services.router.servicer import RouterServicer
from services.router.waiting_line import LineBounds, WaitingLine
from services.router.way_chooser import WayChooser
from services.router.worker_maker import BreakerBounds, CacheView, WorkerMaker
from services.router.worker_watch import WatchTimings
from services.router.workers import Role


@contextlib.asynccontextmanager
async def application(config: RouterConfig, context: ServiceContext) -> AsyncIterator[None]:
    """Serves while entered.

    Raises:
        ConfigError: the model folder lacks a file, or a setting contradicts another.
    """
    tokenizer, template, facts = _read_model(config)
    _check_fleet(config)
    channels = {
        role: ChannelPool(
            context.telemetry,
            # Image files travel to encoders, and in null mode to decode workers; tensors never do.
            message_bytes=MESSAGE_BYTES if role is Role.PREFILL else IMAGE_MESSAGE_BYTES,
            tls=context.peer_tls(role.value),
        )
        for role in Role
    }
    registry = WorkerRegistry(
        _discoveries(config.fleet),
        channels,
        _watch_timings(config.fleet),
        WorkerMaker(
            _cache_view(config.prefixes),
            BreakerBounds(config.fleet.breaker_faults, config.fleet.breaker_open_s),
        ),
        model_name=config.model_name or config.model.resolve().name,
        model_digest=config.model_digest,
    )
    cleanup = CleanupTasks()
    dispatcher = _dispatcher(config, context, registry, cleanup, facts)
    limits = _limits(config, facts)
    builder = PromptBuilder(tokenizer, template, limits, config.prompt_threads)
    downloads = _downloads(config)
    url_images = UrlImages(downloads, limits)
    router = Router(
        _parts(config, context, registry, dispatcher, builder, url_images, tokenizer, limits, facts)
    )
    keys = ApiKeys.load(config.api_keys, config.api_keys_file)
    servicer = RouterServicer(router, registry, limits, keys, config.requests.request_timeout_s)
    router_pb2_grpc.add_RouterServiceServicer_to_server(servicer, context.server.handlers)
    if config.kserve.kserve:
        kserve = KserveServicer(
            router,
            registry,
            dispatcher.has_route,
            context.server,
            keys,
            config.requests.request_timeout_s,
            config.kserve.kserve_stream_requests,
        )
        context.server.handlers.add_generic_rpc_handlers([kserve.handler()])
    watching = asyncio.create_task(_watch(registry, context))
    parts = _http_parts(config, context, router, registry, dispatcher, tokenizer, keys)
    try:
        async with _http_face(config, context, parts):
            # Where one way suffices, the other must not be overlooked because it answered later.
            await registry.wait_until(
                lambda: dispatcher.has_route() and registry.settled, config.fleet.worker_wait_s
            )
            yield
    finally:
        await cleanup.drain(config.requests.control_timeout_s)
        await cancel_and_wait(watching)
        for pool in channels.values():
            await pool.close_all()
        builder.close()
        if downloads is not None:
            await downloads.close()


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


def _read_model(config: RouterConfig) -> tuple[Tokenizer, ChatTemplate | None, ModelFacts]:
    try:
        return (
            Tokenizer.from_folder(config.model),
            ChatTemplate.from_folder(config.model),
            ModelFacts.from_folder(config.model),
        )
    except FileNotFoundError as error:
        raise ConfigError(f"the model folder {config.model} lacks {error.filename}") from error


def _check_fleet(config: RouterConfig) -> None:
    fleet = config.fleet
    if not config.tls.on:
        workers = (*fleet.encoders, *fleet.prefills, *fleet.decodes)
        refuse_plain_text_peers(workers, insecure=config.insecure)
    if fleet.disaggregation_mode == "always" and not fleet.prefills:
        raise ConfigError("--disaggregation-mode always needs --prefills")


def _discoveries(fleet: FleetConfig) -> dict[Role, Discovery]:
    items = {
        Role.ENCODER: fleet.encoders,
        Role.PREFILL: fleet.prefills,
        Role.DECODE: fleet.decodes,
    }
    return {
        role: Discovery(found, period_s=fleet.discovery_period_s) for role, found in items.items()
    }


def _watch_timings(fleet: FleetConfig) -> WatchTimings:
    return WatchTimings(
        silence_s=fleet.worker_silence_s,
        backoff_s=fleet.worker_backoff_s,
        max_backoff_s=fleet.worker_max_backoff_s,
        leave_grace_s=fleet.worker_leave_grace_s,
    )


def _cache_view(prefixes: PrefixConfig) -> CacheView:
    return CacheView(
        events=prefixes.prefix_events,
        blocks=prefixes.prefix_blocks,
        bridge_s=prefixes.prefix_bridge_s,
        assumed_s=prefixes.prefix_assumed_s,
    )


def _limits(config: RouterConfig, facts: ModelFacts) -> RequestLimits:
    bounds = config.requests
    return RequestLimits(
        max_images=bounds.max_images,
        max_video_frames=bounds.max_video_frames,
        takes_videos=facts.video_token_id is not None,
        max_image_bytes=bounds.max_image_bytes,
        max_text_chars=bounds.max_text_chars,
        max_stop_strings=bounds.max_stop_strings,
        max_stop_chars=bounds.max_stop_chars,
        max_grammar_chars=bounds.max_grammar_chars,
    )


def _downloads(config: RouterConfig) -> Downloads | None:
    if not config.image_urls.image_url_hosts:
        return None
    try:
        return Downloads(config.image_urls, config.requests.max_image_bytes)
    except OSError as error:
        raise ConfigError(f"--image-url-ca-file cannot be read: {error}") from error


def _dispatcher(
    config: RouterConfig,
    context: ServiceContext,
    registry: WorkerRegistry,
    cleanup: CleanupTasks,
    facts: ModelFacts,
) -> Dispatcher:
    bounds = config.requests
    return Dispatcher(
        registry,
        cleanup,
        config.fleet.disaggregation_mode,
        DispatchTimings(
            culprit_grace_s=bounds.culprit_grace_s,
            linger_s=bounds.prefill_linger_s,
            control_timeout_s=bounds.control_timeout_s,
            worker_patience_s=bounds.worker_patience_s,
        ),
        AnchorTokens(facts.image_token_id, facts.video_token_id),
        EncoderPlacement(config.fleet.placed_images),
        counter(context.telemetry.meter, semconv.ROUTE_AFFINITY_HIT),
        counter(context.telemetry.meter, semconv.ROUTE_ENCODE_OVERLAP)
        if config.fleet.encode_overlap
        else None,
        WayChooser(
            counter(context.telemetry.meter, semconv.ROUTE_DECISION),
            counter(context.telemetry.meter, semconv.ROUTE_PREDICTED_COST),
            counter(context.telemetry.meter, semconv.ROUTE_EXPLORATION),
            Exploration(),
        ),
        Placer(
            random.Random(),
            registry.maker.transfer_line,
            by_chance=config.fleet.prefill_policy == "random",
        ),
    )


def _http_parts(
    config: RouterConfig,
    context: ServiceContext,
    router: Router,
    registry: WorkerRegistry,
    dispatcher: Dispatcher,
    tokenizer: Tokenizer,
    keys: ApiKeys,
) -> HttpParts:
    http = config.http
    return HttpParts(
        router=router,
        registry=registry,
        has_route=dispatcher.has_route,
        server=context.server,
        telemetry=context.telemetry,
        token_bytes=tokenizer.token_bytes,
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


def _parts(
    config: RouterConfig,
    context: ServiceContext,
    registry: WorkerRegistry,
    dispatcher: Dispatcher,
    builder: PromptBuilder,
    url_images: UrlImages,
    tokenizer: Tokenizer,
    limits: RequestLimits,
    facts: ModelFacts,
) -> RouterParts:
    bounds = config.requests
    line = WaitingLine(
        lambda: bounds.prefill_ahead * max(1, dispatcher.prefill_workers()),
        LineBounds(bounds.queue_requests, bounds.queue_wait_s),
    )
    observe(context.telemetry.meter, {semconv.REQUEST_WAITING: lambda: line.waiting})
    return RouterParts(
        registry=registry,
        dispatcher=dispatcher,
        builder=builder,
        url_images=url_images,
        tokenizer=tokenizer,
        admission=Admission(bounds.max_requests, bounds.max_live_image_bytes),
        line=line,
        limits=limits,
        policy=RetryPolicy(
            max_attempts=bounds.max_attempts,
            backoff_s=bounds.retry_backoff_s,
            max_backoff_s=bounds.retry_max_backoff_s,
        ),
        budget=RetryBudget(bounds.retry_burst, bounds.retry_share),
        telemetry=context.telemetry,
        metrics=GenAiMetrics(
            context.telemetry.meter, config.model_name or config.model.resolve().name
        ),
        retries=counter(context.telemetry.meter, semconv.REQUEST_RETRY),
        end_ids=facts.end_ids,
        first_token_timeout_s=bounds.first_token_timeout_s,
        worker_patience_s=bounds.worker_patience_s,
        output_capacity=bounds.output_capacity,
        coalesce_s=bounds.coalesce_s,
    )
