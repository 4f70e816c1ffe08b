"""Control calls between the sides of a hand-over. The services carry them over gRPC."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from epd.engine.kv_layout import KvLayout
from epd.errors import EpdError
from epd.transfer.base import AgentDescriptor, Segment


@dataclass(frozen=True)
class Reservation:
    """Decode memory that a transfer may WRITE to.

    ``block_ids`` are in prompt order; the leading ``cached_block_count`` of them hold their KV
    already and must not be written. Without a WRITE or a Renew for ``progress_timeout_s`` the
    reservation ends.
    """

    transfer_id: str
    generation: int
    block_ids: tuple[int, ...]
    seal: Segment
    cached_block_count: int
    progress_timeout_s: float
    #: The seal must carry a digest of each layer.
    checksum: bool = False
    #: Decode follows the layers: each leaves as a WRITE of its own, and the first token is
    #: announced ahead of the seal.
    layer_notices: bool = False


class DecodeControl(Protocol):
    """Calls from prefill to one decode process; every one raises EpdError and is idempotent."""

    async def reserve(
        self, transfer_id: str, token_count: int, block_hashes: Sequence[bytes]
    ) -> Reservation:
        """Asks for blocks, and which of the leading full ones, named by hash, are there already;
        may wait in decode's bounded queue.
        """

    async def announce(
        self, transfer_id: str, generation: int, first_token: int, writes_per_layer: int
    ) -> None:
        """Says which token was drawn, and that so many WRITEs of each layer are all."""

    async def renew(self, transfer_ids: Sequence[str]) -> Sequence[str]:
        """Says that transfers make progress; returns those decode has given up."""

    async def fail(self, transfer_id: str, error: EpdError, settled: bool) -> None:
        """Says why a transfer failed; ``settled``: no WRITE of it runs or will be posted."""

    async def settle(self, transfer_ids: Sequence[str]) -> None:
        """Confirms that no WRITE of the transfers runs or will be posted."""


class EncoderControl(Protocol):
    """Calls from prefill to one encoder; every one raises EpdError and is idempotent."""

    async def await_ready(self, handle_id: str) -> None:
        """Returns once the embedding is in place; raises why its encoding failed."""

    async def renew(self, handle_ids: Sequence[str]) -> Sequence[str]:
        """Starts leases anew, as their reader; returns the handles the encoder does not know."""

    async def release(self, handle_ids: Sequence[str], settled: bool) -> None:
        """Gives leases back; ``settled``: no READ of them runs or will be posted."""


@dataclass(frozen=True)
class PushTarget:
    """A paired decode process: where KV may be pushed."""

    agent: AgentDescriptor
    layout: KvLayout
    control: DecodeControl

    @property
    def instance_id(self) -> str:
        """The process start; a restarted process is another target."""
        return self.agent.instance_id
