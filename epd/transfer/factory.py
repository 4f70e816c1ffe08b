"""Transports by name."""

from collections.abc import Callable

from epd.errors import UnsupportedFeatureError
from epd.transfer.base import TransferBackend
from epd.transfer.local_backend import LocalBackend, LocalFabric
from epd.transfer.nixl_backend import NixlBackend, NixlOptions

TRANSPORTS = ("nixl", "local")


def backend_opener(
    transport: str,
    agent_name: str,
    instance_id: str,
    *,
    nixl: NixlOptions | None = None,
    fabric: LocalFabric | None = None,
) -> Callable[[], TransferBackend]:
    """A function that opens the backend; the agent calls it on its own thread.

    Raises:
        UnsupportedFeatureError: no such transport.
    """
    if transport == "nixl":
        return lambda: NixlBackend(agent_name, instance_id, nixl or NixlOptions())
    if transport == "local":
        if fabric is None:
            raise UnsupportedFeatureError("transport local works inside one process only")
        return lambda: LocalBackend(agent_name, instance_id, fabric)
    raise UnsupportedFeatureError(
        f"transport {transport!r} is unknown, known are {', '.join(TRANSPORTS)}"
    )
