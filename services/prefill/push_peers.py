"""Brings decode peers into the data plane and out of it."""

import asyncio
import logging

from epd.engine.kv_layout import check_regions
from epd.errors import TransferFailedError
from epd.handover.sender import KvSender
from epd.transfer.agent import TransferAgent
from epd.transfer.base import Segment
from epd.transfer.probe import measure_bandwidth
from services.prefill.peer_link import DecodePeer

logger = logging.getLogger(__name__)


class PushPeers:
    """What happens to agent and sender when a decode worker is paired and when it is gone.

    Args:
        agent: Started.
        sender: Told of every peer.
        scratch: Registered memory for bandwidth probes.
        expect_rdma: Whether a slow peer deserves a warning.
        probe_timeout_s: A peer that cannot be read for so long is not paired with.
    """

    def __init__(
        self,
        agent: TransferAgent,
        sender: KvSender,
        scratch: Segment,
        expect_rdma: bool,
        probe_timeout_s: float,
    ) -> None:
        self._agent = agent
        self._sender = sender
        self._scratch = scratch
        self._expect_rdma = expect_rdma
        self._probe_timeout_s = probe_timeout_s
        # Two probes at once would write to the same scratch memory and share the wire.
        self._probing = asyncio.Lock()
        #: Bytes per second, by instance id, of the peers paired now.
        self.bandwidth: dict[str, float] = {}

    async def join(self, peer: DecodePeer) -> None:
        """Connects and warms the connection up; the first transfer pays for the wire-up.

        Raises:
            LayoutMismatchError: its memory cannot be what it says.
            EpdError: the peer's memory cannot be reached.
        """
        check_regions(peer.target.layout)
        await asyncio.wrap_future(self._agent.connect(peer.target.agent))
        await self._probe(peer)
        self._sender.peer_arrived(peer.target)

    async def leave(self, peer: DecodePeer) -> None:
        """Fails what is being pushed there and forgets the process start."""
        self._sender.peer_gone(peer.target)
        self.bandwidth.pop(peer.instance_id, None)
        await asyncio.wrap_future(self._agent.disconnect(peer.target.agent.agent_name))

    async def _probe(self, peer: DecodePeer) -> None:
        region = peer.target.layout.regions[0]
        remote = Segment(region.address, region.length, region.device_id)
        async with self._probing:
            try:
                # A READ from a process that hangs, or behind a firewall, has no end of its own.
                async with asyncio.timeout(self._probe_timeout_s):
                    report = await measure_bandwidth(
                        self._agent, peer.target.agent.agent_name, self._scratch, remote
                    )
            except TimeoutError:
                raise TransferFailedError(
                    f"decode worker {peer.address} answers calls, and its memory could not be read "
                    f"in {self._probe_timeout_s} s over {peer.target.agent.transport}"
                ) from None
        self.bandwidth[peer.instance_id] = report.bytes_per_s
        level = logging.WARNING if report.slow and self._expect_rdma else logging.INFO
        logger.log(
            level,
            "decode %s is reached at %.2f GB/s over %s%s",
            peer.address,
            report.bytes_per_s / 1e9,
            peer.target.agent.transport,
            "; RDMA was expected, this looks like TCP" if level == logging.WARNING else "",
        )
