"""Puts a router together from its settings."""

import random
from dataclasses import dataclass

from epd.cleanup import CleanupTasks
from epd.config import ConfigError
from epd.rpc.service import ServiceContext
from epd.telemetry import semconv
from epd.telemetry.genai_metrics import GenAiMetrics
from epd.telemetry.metrics import counter, observe
from epd.text.chat_template import ChatTemplate
from epd.text.model_facts import ModelFacts
from epd.text.tokenizer import Tokenizer
from services.router.admission import Admission
from services.router.anchor_tokens import AnchorTokens
from services.router.config import RouterConfig
from services.router.dispatcher import Dispatcher
from services.router.encoder_placement import EncoderPlacement
from services.router.expansion import Expander
from services.router.exploration import Exploration
from services.router.image_dispatch import ImageDispatch
from services.router.image_urls.downloads import Downloads
from services.router.image_urls.url_images import UrlImages
from services.router.limits import RequestLimits
from services.router.pair_dispatch import DispatchTimings, PairParts
from services.router.placement import Placer
from services.router.prompt import PromptBuilder
from services.router.registry import WorkerRegistry
from services.router.retry import RetryPolicy
from services.router.retry_budget import RetryBudget
from services.router.router import Router
from services.router.router_parts import RouterParts
from services.router.routes import Routes
from services.router.waiting_line import LineBounds, WaitingLine
from services.router.way_chooser import WayChooser


@dataclass(frozen=True)
class Assembly:
    """A router and those of its parts that others need too. Closed by its owner."""

    router: Router
    routes: Routes
    tokenizer: Tokenizer
    limits: RequestLimits
    builder: PromptBuilder
    downloads: Downloads | None
    cleanup: CleanupTasks

    async def close(self, timeout_s: float) -> None:
        """Waits so long for what outlives requests, and ends the rest."""
        await self.cleanup.drain(timeout_s)
        self.builder.close()
        if self.downloads is not None:
            await self.downloads.close()


def assemble(config: RouterConfig, context: ServiceContext, registry: WorkerRegistry) -> Assembly:
    """A router for these workers.

    Raises:
        ConfigError: the model folder lacks a file, or a setting contradicts another.
    """
    bounds, meter = config.requests, context.telemetry.meter
    tokenizer, template, facts = _read_model(config)
    limits = _limits(config, facts)
    builder = PromptBuilder(tokenizer, template, limits, config.prompt_threads)
    downloads = _downloads(config)
    cleanup = CleanupTasks()
    routes = Routes(registry, config.fleet.disaggregation_mode, bounds.worker_patience_s)
    line = WaitingLine(
        lambda: bounds.prefill_ahead * max(1, len(routes.prompt_workers())),
        LineBounds(bounds.queue_requests, bounds.queue_wait_s),
    )
    observe(meter, {semconv.REQUEST_WAITING: lambda: line.waiting})
    router = Router(
        RouterParts(
            registry=registry,
            routes=routes,
            dispatcher=_dispatcher(config, context, registry, routes, cleanup, facts),
            builder=builder,
            url_images=UrlImages(downloads, limits),
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
            metrics=GenAiMetrics(meter, config.model_name or config.model.resolve().name),
            retries=counter(meter, semconv.REQUEST_RETRY),
            end_ids=facts.end_ids,
            first_token_timeout_s=bounds.first_token_timeout_s,
            worker_patience_s=bounds.worker_patience_s,
            output_capacity=bounds.output_capacity,
            coalesce_s=bounds.coalesce_s,
        )
    )
    return Assembly(router, routes, tokenizer, limits, builder, downloads, cleanup)


def _read_model(config: RouterConfig) -> tuple[Tokenizer, ChatTemplate | None, ModelFacts]:
    try:
        return (
            Tokenizer.from_folder(config.model),
            ChatTemplate.from_folder(config.model),
            ModelFacts.from_folder(config.model),
        )
    except FileNotFoundError as error:
        raise ConfigError(f"the model folder {config.model} lacks {error.filename}") from error


def _limits(config: RouterConfig, facts: ModelFacts) -> RequestLimits:
    bounds = config.requests
    return RequestLimits(
        max_images=bounds.max_images,
        max_video_frames=bounds.max_video_frames,
        takes_videos=facts.video_token_id is not None,
        max_image_bytes=bounds.max_image_bytes,
        max_text_chars=bounds.max_text_chars,
        max_list_items=bounds.max_list_items,
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
    routes: Routes,
    cleanup: CleanupTasks,
    facts: ModelFacts,
) -> Dispatcher:
    fleet, bounds, meter = config.fleet, config.requests, context.telemetry.meter
    transfer = registry.maker.transfer_line
    overlapped = counter(meter, semconv.ROUTE_ENCODE_OVERLAP) if fleet.encode_overlap else None
    parts = PairParts(
        routes=routes,
        images=ImageDispatch(
            routes,
            EncoderPlacement(fleet.placed_images),
            counter(meter, semconv.ROUTE_AFFINITY_HIT),
        ),
        expander=Expander(registry),
        placer=Placer(random.Random(), transfer, by_chance=fleet.prefill_policy == "random"),
        transfer=transfer,
        cleanup=cleanup,
        timings=DispatchTimings(
            culprit_grace_s=bounds.culprit_grace_s,
            linger_s=bounds.prefill_linger_s,
            control_timeout_s=bounds.control_timeout_s,
        ),
        overlapped=overlapped,
    )
    chooser = WayChooser(
        counter(meter, semconv.ROUTE_DECISION),
        counter(meter, semconv.ROUTE_PREDICTED_COST),
        counter(meter, semconv.ROUTE_EXPLORATION),
        Exploration(),
    )
    anchor_tokens = AnchorTokens(facts.image_token_id, facts.video_token_id)
    return Dispatcher(registry, parts, chooser, anchor_tokens, context.telemetry.tracer)
