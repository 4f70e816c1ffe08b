"""A KV pool without a model: the geometry of SmolLM2-135M, bytes that mean nothing."""

import dataclasses
import random
import zlib
from collections.abc import Sequence

import numpy as np

from epd.engine.block_pool import BlockPool
from epd.engine.kv_layout import KvLayout, KvRegion
from epd.transfer.buffer import HostBuffer

#: SmolLM2-135M in float32: a block of 32 tokens has 48 KiB per layer, 1.4 MiB in all.
SHAPE = KvLayout(
    model_digest="synthetic",
    layer_count=30,
    kv_head_count=3,
    head_dim=64,
    dtype="float32",
    block_size=32,
)


class ShuffledPool(BlockPool):
    """Hands blocks out in random order, as no real pool does: nothing can be coalesced."""

    def __init__(self, num_blocks: int) -> None:
        super().__init__(num_blocks, SHAPE.block_size, enable_prefix_cache=False)
        self._chance = random.Random()

    def seed(self, seed: int) -> None:
        """The same seed gives the same blocks, as long as all blocks are free."""
        self._chance.seed(seed)

    def allocate(self, count: int, keep_free: int = 0) -> list[int] | None:
        whole = super().allocate(self.num_blocks)
        assert whole is not None, "one transfer at a time"
        self._chance.shuffle(whole)
        self.free(whole[count:])
        return whole[:count]


class SyntheticKv:
    """Registered-to-be memory of ``num_blocks`` blocks and its layout."""

    def __init__(self, num_blocks: int) -> None:
        self.pool = ShuffledPool(num_blocks)
        self.memory = HostBuffer(SHAPE.layer_count * num_blocks * SHAPE.block_bytes)
        region = KvRegion(
            first_layer=0,
            layer_count=SHAPE.layer_count,
            address=self.memory.address,
            length=self.memory.segment.length,
            device_id=0,
            layer_stride=num_blocks * SHAPE.block_bytes,
            block_stride=SHAPE.block_bytes,
        )
        self.layout = dataclasses.replace(SHAPE, regions=(region,))

    def fill(self, seed: int) -> None:
        """Puts noise into all blocks."""
        generator = np.random.default_rng(seed)
        self.memory.view()[:] = generator.integers(
            0, 256, self.memory.segment.length, dtype=np.uint8
        )

    def choose(self, seed: int, count: int) -> list[int]:
        """The blocks that this seed gives; they stay free, for the next one who asks."""
        self.pool.seed(seed)
        blocks = self.pool.allocate(count)
        assert blocks is not None
        self.pool.free(blocks)
        self.pool.seed(seed)
        return blocks

    def checksum(self, blocks: Sequence[int]) -> int:
        """Of some blocks' bytes, in their order."""
        shape = (SHAPE.layer_count, self.pool.num_blocks, SHAPE.block_bytes)
        return zlib.crc32(self.memory.view().reshape(shape)[:, list(blocks)].tobytes())


def blocks_of(byte_count: int) -> int:
    """Whole blocks that have about so many bytes in all layers together."""
    return max(1, round(byte_count / (SHAPE.block_bytes * SHAPE.layer_count)))
