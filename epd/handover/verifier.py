"""Compares KV that has arrived with what was sent."""

import asyncio
import logging

from epd.errors import DataLossError
from epd.handover.layer_digests import BlockReader, differing_layers
from epd.handover.lease import Lease

log = logging.getLogger(__name__)


class KvVerifier:
    """Checks sealed transfers against the digests in their seals.

    Args:
        read_block: Reads this worker's KV.
    """

    def __init__(self, read_block: BlockReader) -> None:
        self._read_block = read_block

    async def check(self, lease: Lease) -> None:
        """Hashes what was pushed, off the event loop. The lease may have ended when it returns.

        Raises:
            DataLossError: naming the layers that differ.
        """
        assert lease.record is not None
        wrong = await asyncio.to_thread(
            differing_layers, lease.record.layer_digests, lease.writable_blocks, self._read_block
        )
        if wrong:
            error = DataLossError(
                f"KV push from prefill to decode: {len(wrong)} layers of transfer "
                f"{lease.transfer_id} did not arrive as they were sent, the first is {wrong[0]}"
            )
            log.error("%s", error.message)
            raise error
