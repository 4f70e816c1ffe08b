"""Geometry of the KV memory and what must be equal between two workers. Plain Python, no torch."""

from dataclasses import dataclass

from epd.engine.head_ranges import rank_heads
from epd.errors import LayoutMismatchError
from epd.host_memory import MEMORY_END

PROTOCOL_VERSION = 3
DTYPE_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2}


@dataclass(frozen=True)
class KvRegion:
    """Registered memory of consecutive layers; strides and length in bytes."""

    first_layer: int
    layer_count: int
    address: int
    length: int
    device_id: int
    layer_stride: int
    block_stride: int

    def block_address(self, layer: int, block: int) -> int:
        """Address of one block of one layer: its keys, then its values."""
        return (
            self.address
            + (layer - self.first_layer) * self.layer_stride
            + block * self.block_stride
        )


@dataclass(frozen=True)
class KvLayout:
    """Shape of a worker's KV: per layer [block, plane, kv_head, slot, head_dim].

    ``planes`` is 2 for keys and values, 1 for a latent that stands for both and is one "head".
    ``head_start`` and ``head_count`` follow from heads, degree and rank; 0 heads means all of them.
    """

    model_digest: str
    layer_count: int
    kv_head_count: int
    head_dim: int
    dtype: str
    block_size: int
    tp_degree: int = 1
    tp_rank: int = 0
    head_start: int = 0
    head_count: int = 0
    regions: tuple[KvRegion, ...] = ()
    protocol_version: int = PROTOCOL_VERSION
    planes: int = 2

    @property
    def heads_held(self) -> int:
        """KV heads of this rank."""
        return self.head_count or self.kv_head_count

    @property
    def block_bytes(self) -> int:
        """Bytes of one block of one layer: all planes of this rank's heads."""
        slots = self.planes * self.heads_held * self.block_size
        return slots * self.head_dim * DTYPE_BYTES[self.dtype]

    def blocks_for(self, token_count: int) -> int:
        """Blocks that hold ``token_count`` tokens."""
        return -(-token_count // self.block_size)

    def region_of(self, layer: int) -> KvRegion:
        """The region that holds a layer; the layer must exist."""
        for region in self.regions:
            if region.first_layer <= layer < region.first_layer + region.layer_count:
                return region
        raise AssertionError(f"no region holds layer {layer}")


#: Fields that two workers must have in common before any byte moves.
EQUAL_FIELDS = (
    "protocol_version",
    "model_digest",
    "layer_count",
    "kv_head_count",
    "head_dim",
    "dtype",
    "block_size",
    "planes",
)


def check_compatible(mine: KvLayout, theirs: KvLayout) -> None:
    """Refuses a pair whose KV does not fit.

    Raises:
        LayoutMismatchError: names every differing field with both values.
    """
    differing = [
        f"{name}: {getattr(mine, name)} here, {getattr(theirs, name)} there"
        for name in EQUAL_FIELDS
        if getattr(mine, name) != getattr(theirs, name)
    ]
    if differing:
        raise LayoutMismatchError("KV layouts do not fit: " + "; ".join(differing))
    _check_rank(theirs)
    if (mine.tp_degree, theirs.tp_degree) != (1, 1):
        raise LayoutMismatchError(
            f"tensor-parallel degrees {mine.tp_degree} here and {theirs.tp_degree} there "
            "are not supported yet"
        )


def check_regions(layout: KvLayout) -> None:
    """Refuses regions that cannot hold the layout's layers, before anything computes with them.

    Raises:
        LayoutMismatchError: a region is not what it is said to be, or a layer lies in none.
    """
    held: set[int] = set()
    for one in layout.regions:
        last = one.first_layer + one.layer_count
        if not one.layer_count or last > layout.layer_count:
            raise LayoutMismatchError(
                f"a region of KV memory is said to hold layers {one.first_layer} to {last - 1} of "
                f"{layout.layer_count}"
            )
        needed = (one.layer_count - 1) * one.layer_stride + layout.block_bytes
        if (
            one.block_stride < layout.block_bytes
            or one.length < needed
            or one.address + one.length > MEMORY_END
        ):
            raise LayoutMismatchError(
                f"a region of {one.length} bytes at {one.address:#x} with strides of "
                f"{one.layer_stride} and {one.block_stride} bytes cannot hold {one.layer_count} "
                f"layers with blocks of {layout.block_bytes} bytes"
            )
        held.update(range(one.first_layer, last))
    missing = [layer for layer in range(layout.layer_count) if layer not in held]
    if missing:
        raise LayoutMismatchError(f"no region of KV memory holds layer {missing[0]}")


def _check_rank(layout: KvLayout) -> None:
    """Refuses a layout whose heads are not those of its rank."""
    due = rank_heads(layout.kv_head_count, layout.tp_degree, layout.tp_rank)
    if (layout.head_start, layout.heads_held) != (due.start, len(due)):
        raise LayoutMismatchError(
            f"rank {layout.tp_rank} of {layout.tp_degree} holds {len(due)} of "
            f"{layout.kv_head_count} KV heads from {due.start} on; there it is said to hold "
            f"{layout.heads_held} from {layout.head_start} on"
        )
