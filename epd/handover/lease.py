"""One transfer's hold on decode memory."""

import enum
from dataclasses import dataclass, field

from epd.engine.kv_arrival import KvArrival
from epd.handover.seal import SealRecord


class LeaseState(enum.Enum):
    """RESERVED → RECEIVING → SEALED, then the engine owns the blocks (RUNNING) and the lease ends.

    From RESERVED or RECEIVING a failure leads to QUARANTINED: the memory is nobody's, yet the
    writer may still touch it.
    """

    RESERVED = "reserved"
    RECEIVING = "receiving"
    SEALED = "sealed"
    QUARANTINED = "quarantined"


@dataclass
class Lease:
    """Mutable, owned by the lease table. Times are the table's clock in nanoseconds."""

    transfer_id: str
    generation: int
    peer: str
    block_ids: tuple[int, ...]
    cached_block_count: int
    seal_slot: int
    progress_ns: int
    state: LeaseState = LeaseState.RESERVED
    #: Ordinals of the KV WRITEs that have arrived.
    arrived: set[int] = field(default_factory=set)
    layers: set[int] = field(default_factory=set)
    record: SealRecord | None = None
    #: The writer has confirmed that it is through.
    settled: bool = False
    #: Follows the layers, where decode may begin before they are all there.
    arrival: KvArrival | None = None
    #: What prefill has drawn, told ahead of the seal.
    announced_token: int | None = None
    #: The engine has a step on the blocks, or may have one at any moment.
    lent: bool = False

    @property
    def writable_blocks(self) -> tuple[int, ...]:
        """Blocks the writer may touch; the cached ones before them are read only."""
        return self.block_ids[self.cached_block_count :]

    @property
    def complete(self) -> bool:
        """The seal and everything it counts has arrived."""
        return self.record is not None and len(self.arrived) == self.record.write_count

    def describe(self, layer_count: int) -> str:
        """How far the transfer has come, for error texts."""
        expected = "unknown, no seal" if self.record is None else str(self.record.write_count)
        return (
            f"{len(self.layers)} of {layer_count} layers, "
            f"{len(self.arrived)} WRITEs arrived (expected: {expected})"
        )
