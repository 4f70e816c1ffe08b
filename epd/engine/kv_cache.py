"""The memory that holds the KV of all requests."""

import math
from dataclasses import replace

import torch

from epd.engine.kv_layout import KvLayout, KvRegion
from epd.host_memory import host_memory


class KVCache:
    """One tensor [layer, block, k/v, kv_head, slot, head_dim] and what a peer must know of it.

    The memory is written once at the start, so that every page exists before it is registered, and
    never moves. ``layers`` are views of single layers, [block, k/v, kv_head, slot, head_dim].
    """

    def __init__(self, layout: KvLayout, num_blocks: int, device: torch.device) -> None:
        assert layout.planes == 2, "no attention here reads latents"
        shape = (
            layout.layer_count,
            num_blocks,
            2,
            layout.head_count or layout.kv_head_count,
            layout.block_size,
            layout.head_dim,
        )
        self.num_blocks = num_blocks
        self.tensor = _zeros(shape, getattr(torch, layout.dtype), device)
        self.layers = tuple(self.tensor.unbind(0))
        region = KvRegion(
            first_layer=0,
            layer_count=layout.layer_count,
            address=self.tensor.data_ptr(),
            length=self.tensor.nbytes,
            device_id=device.index or 0,
            layer_stride=num_blocks * layout.block_bytes,
            block_stride=layout.block_bytes,
        )
        #: The given layout with the regions filled in.
        self.layout = replace(layout, regions=(region,))

    def read_block(self, layer: int, block: int) -> bytes:
        """A copy of one block's bytes, keys and values. Waits for the device; for checksums."""
        block_tensor = self.layers[layer][block].contiguous().cpu()
        return block_tensor.view(torch.uint8).numpy().tobytes()


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    memory = host_memory(math.prod(shape) * dtype.itemsize)
    return torch.from_numpy(memory).view(dtype).view(shape)
