"""Transports by name."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from epd.errors import UnsupportedFeatureError
from epd.transfer.base import TransferBackend
from epd.transfer.collective_options import CollectiveOptions
from epd.transfer.local_backend import LocalBackend, LocalFabric
from epd.transfer.mooncake_backend import MooncakeBackend, MooncakeOptions
from epd.transfer.nixl_backend import NixlBackend, NixlOptions
from epd.transfer.transports import Transports

TRANSPORTS = ("nixl", "mooncake", "collective", "local")


@dataclass(frozen=True)
class TransportOptions:
    """What the transports need to know.

    ``host``: numeric address by which peers reach this process. ``fabric``: where transport local
    finds its peers; None makes one that holds nobody else.
    """

    host: str = "127.0.0.1"
    nixl: NixlOptions = field(default_factory=NixlOptions)
    mooncake: MooncakeOptions = field(default_factory=MooncakeOptions)
    collective: CollectiveOptions = field(default_factory=CollectiveOptions)
    fabric: LocalFabric | None = None


def backend_opener(
    transports: Sequence[str],
    agent_name: str,
    instance_id: str,
    options: TransportOptions | None = None,
) -> Callable[[], TransferBackend]:
    """A function that opens the transports; the agent calls it on its own thread.

    ``transports``: the preferred one first.

    Raises:
        UnsupportedFeatureError: no such transport, or none at all.
    """
    options = options or TransportOptions()
    unknown = [name for name in transports if name not in TRANSPORTS]
    if unknown or not transports:
        raise UnsupportedFeatureError(
            f"transports {', '.join(unknown) or 'none'}: known are {', '.join(TRANSPORTS)}"
        )
    openers = [
        _opener(name, agent_name, instance_id, options) for name in dict.fromkeys(transports)
    ]

    def opened() -> TransferBackend:
        backends: list[TransferBackend] = []
        try:
            for opener in openers:
                backends.append(opener())  # noqa: PERF401 - those opened so far are to be closed
        except BaseException:
            for backend in backends:
                backend.close()
            raise
        return backends[0] if len(backends) == 1 else Transports(backends)

    return opened


def _opener(
    name: str, agent_name: str, instance_id: str, options: TransportOptions
) -> Callable[[], TransferBackend]:
    if name == "nixl":
        return lambda: NixlBackend(agent_name, instance_id, options.nixl)
    if name == "mooncake":
        return lambda: MooncakeBackend(agent_name, instance_id, options.host, options.mooncake)
    if name == "collective":
        # torch.distributed takes a while to import, and not every worker uses it. Here and not on
        # the agent thread, whose calls are bounded in time.
        from epd.transfer.collective_backend import CollectiveBackend

        return lambda: CollectiveBackend(agent_name, instance_id, options.host, options.collective)
    assert name == "local"
    return lambda: LocalBackend(agent_name, instance_id, options.fabric or LocalFabric())
