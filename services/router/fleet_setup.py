"""Makes the router's view of the fleet from its settings."""

from collections.abc import Mapping

from epd.config import ConfigError
from epd.rpc.channels import ChannelPool
from epd.rpc.credentials import refuse_plain_text_peers
from epd.rpc.discovery import Discovery
from epd.rpc.options import IMAGE_MESSAGE_BYTES, MESSAGE_BYTES
from epd.rpc.service import ServiceContext
from services.router.config import RouterConfig
from services.router.registry import WorkerRegistry
from services.router.worker_maker import BreakerBounds, CacheView, WorkerMaker
from services.router.worker_watch import WatchTimings
from services.router.workers import Role


def make_channels(context: ServiceContext) -> dict[Role, ChannelPool]:
    """A pool per role; the caller closes them."""
    return {
        role: ChannelPool(
            context.telemetry,
            # Image files travel to encoders, and in null mode to decode workers; tensors never do.
            message_bytes=MESSAGE_BYTES if role is Role.PREFILL else IMAGE_MESSAGE_BYTES,
            tls=context.peer_tls(role.value),
        )
        for role in Role
    }


def make_registry(config: RouterConfig, channels: Mapping[Role, ChannelPool]) -> WorkerRegistry:
    """The workers that the settings name, none of them reached yet.

    Raises:
        ConfigError: a worker would be spoken to in plain text, or a mode lacks its workers.
    """
    fleet, prefixes = config.fleet, config.prefixes
    addresses = {
        Role.ENCODER: fleet.encoders,
        Role.PREFILL: fleet.prefills,
        Role.DECODE: fleet.decodes,
    }
    if not config.tls.on:
        named = [address for found in addresses.values() for address in found]
        refuse_plain_text_peers(named, insecure=config.insecure)
    if fleet.disaggregation_mode == "always" and not fleet.prefills:
        raise ConfigError("--disaggregation-mode always needs --prefills")
    cache_view = CacheView(
        events=prefixes.prefix_events,
        blocks=prefixes.prefix_blocks,
        bridge_s=prefixes.prefix_bridge_s,
        assumed_s=prefixes.prefix_assumed_s,
    )
    timings = WatchTimings(
        silence_s=fleet.worker_silence_s,
        backoff_s=fleet.worker_backoff_s,
        max_backoff_s=fleet.worker_max_backoff_s,
        leave_grace_s=fleet.worker_leave_grace_s,
    )
    return WorkerRegistry(
        {
            role: Discovery(found, period_s=fleet.discovery_period_s)
            for role, found in addresses.items()
        },
        channels,
        timings,
        WorkerMaker(cache_view, BreakerBounds(fleet.breaker_faults, fleet.breaker_open_s)),
        model_name=config.model_name or config.model.resolve().name,
        model_digest=config.model_digest,
    )
