"""Paged attention over the KV layout as it lies in memory: no gather, no copy."""

import ctypes

import torch

from epd.engine.attention import AttentionMetadata
from epd.engine.native.library import NativeLibrary
from epd.engine.native.structs import PagedKv, Sequences


class NativeAttention:
    """A step's attention in native code; a StepAttention.

    Decode tokens and prefill chunks of all sequences go in one call. A token's output is the same
    to the last bit whatever else is in the step and however its prompt is cut into chunks.
    """

    def __init__(self, library: NativeLibrary, metadata: AttentionMetadata) -> None:
        self.library = library
        # The struct holds addresses, so the tensors must live as long as this object.
        self._metadata = metadata
        self._slots = metadata.slot_blocks * metadata.block_size + metadata.slot_offsets
        self.sequences = Sequences(
            block_tables=metadata.block_tables.data_ptr(),
            query_starts=metadata.query_starts.data_ptr(),
            context_lens=metadata.context_lens.data_ptr(),
            slots=self._slots.data_ptr(),
            table_stride=metadata.block_tables.shape[1],
            count=len(metadata.context_lens_list),
        )

    def write(self, layer_kv: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> None:
        """Stores keys and values [tokens, kv_heads, head_dim]."""
        key, value = key.contiguous(), value.contiguous()
        self.library.functions.epd_write_kv(
            key.data_ptr(),
            value.data_ptr(),
            ctypes.byref(paged_kv(layer_kv)),
            self.sequences.slots,
            key.shape[0],
        )

    def attend(self, query: torch.Tensor, layer_kv: torch.Tensor, scale: float) -> torch.Tensor:
        """Causal attention; [tokens, heads, head_dim] in and out."""
        query = query.contiguous()
        output = torch.empty_like(query)
        self.library.functions.epd_paged_attention(
            query.data_ptr(),
            output.data_ptr(),
            query.shape[1],
            ctypes.byref(paged_kv(layer_kv)),
            ctypes.byref(self.sequences),
            scale,
            self.library.threads,
        )
        return output


def paged_kv(layer_kv: torch.Tensor) -> PagedKv:
    """A layer [block, 2, kv_head, slot, head_dim] as the kernels see it; it stays the caller's."""
    assert layer_kv.dtype == torch.float32
    assert layer_kv.is_contiguous()
    _, _, kv_heads, block_size, head_dim = layer_kv.shape
    return PagedKv(layer_kv.data_ptr(), kv_heads, block_size, head_dim)
