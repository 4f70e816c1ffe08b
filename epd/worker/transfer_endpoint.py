"""The transfer endpoint of one process start."""

from collections.abc import Iterable, Sequence

from epd.transfer.agent import TransferAgent
from epd.transfer.base import Segment
from epd.transfer.factory import TransportOptions, backend_opener
from epd.transfer.faults import Faults
from epd.transfer.faulty_backend import FaultyBackend


def open_endpoint(
    transports: Sequence[str],
    role: str,
    instance_id: str,
    memory: Iterable[tuple[Segment, str]],
    faults: Faults | None = None,
    options: TransportOptions | None = None,
) -> TransferAgent:
    """A running agent with all of a process's memory registered. Blocks for a moment.

    ``transports``: the preferred one first. ``memory`` comes with its kind, DRAM or VRAM.
    ``faults`` are for tests.

    Memory registered later would be unknown to peers that already have the descriptor.

    Raises:
        EpdError: the transfer library is missing or refuses the memory.
    """
    # A name of its own for each start: a restarted process must never pass for its predecessor.
    open_backend = backend_opener(transports, f"{role}.{instance_id}", instance_id, options)
    agent = TransferAgent(
        (lambda: FaultyBackend(open_backend(), faults)) if faults else open_backend
    )
    agent.start()
    try:
        for segment, memory_kind in memory:
            agent.register(segment, memory_kind)
    except BaseException:
        agent.stop()
        raise
    return agent
