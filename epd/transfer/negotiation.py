"""Which transport two processes use."""

from collections.abc import Sequence

from epd.errors import TransportMismatchError
from epd.transfer.base import AgentDescriptor


def negotiate(
    mine: Sequence[AgentDescriptor], theirs: Sequence[AgentDescriptor]
) -> tuple[AgentDescriptor, AgentDescriptor]:
    """The first transport of ``mine`` that both have: its descriptors on both sides.

    ``mine`` are those of the side that begins the transfers, so both sides come to the same
    transport, each from the same two lists.

    Raises:
        TransportMismatchError: there is none; the message names both lists.
    """
    for here in mine:
        for there in theirs:
            if here.transport == there.transport and _reach(here, there):
                return here, there
    raise TransportMismatchError(
        f"no transport in common: {_names(mine)} on the sending side, {_names(theirs)} on the "
        "receiving one"
    )


def _reach(here: AgentDescriptor, there: AgentDescriptor) -> bool:
    """Transport local names its process: it leads to no other."""
    return here.transport != "local" or here.metadata == there.metadata


def _names(agents: Sequence[AgentDescriptor]) -> str:
    return ", ".join(one.transport for one in agents) or "none"
