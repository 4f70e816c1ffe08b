"""How fast a peer can really be reached."""

import asyncio
import time
from dataclasses import dataclass

from epd.transfer.agent import TransferAgent
from epd.transfer.base import Segment

#: Slower than this between machines with RDMA means: the library has fallen back to TCP.
SLOW_BYTES_PER_S = 1e9


@dataclass(frozen=True)
class BandwidthReport:
    """Best of a few READs. ``first_ns`` is the first one, which pays for the connection."""

    bytes_per_s: float
    first_ns: int

    @property
    def slow(self) -> bool:
        """Slow enough to warn where RDMA is expected."""
        return self.bytes_per_s < SLOW_BYTES_PER_S


async def measure_bandwidth(
    agent: TransferAgent, peer: str, scratch: Segment, remote: Segment, rounds: int = 3
) -> BandwidthReport:
    """READs as much of ``remote`` as fits into ``scratch`` (both registered), a few times over.

    It reads and never writes, so the peer's memory may be in use; the bytes mean nothing. It also
    warms the connection up. Sizes of 1 MiB and more give sensible numbers.

    Raises:
        TransferFailedError: the peer cannot be reached.
    """
    length = min(scratch.length, remote.length)
    here = Segment(scratch.address, length, scratch.device_id)
    there = Segment(remote.address, length, remote.device_id)
    took: list[int] = []
    for _ in range(1 + rounds):
        started = time.perf_counter_ns()
        await asyncio.wrap_future(agent.read(peer, [here], [there]))
        took.append(time.perf_counter_ns() - started)
    return BandwidthReport(length / min(took[1:]) * 1e9, took[0])
