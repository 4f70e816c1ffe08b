"""Paged attention in plain torch: runs everywhere, gathers blocks before it attends.

What is gathered beyond a sequence's tokens is masked, and a masked NaN is a NaN all the same: one
request whose numbers overflow would spoil whoever gets its blocks, one after another. So nothing
is gathered that a sequence has not written, or seen zeroed, itself.
"""

from collections.abc import Iterator

import torch
from torch.nn.functional import scaled_dot_product_attention

from epd.engine.attention import AttentionMetadata

#: Bound on the tokens gathered at once for single-token sequences, padding included.
GATHERED_TOKENS = 16384


class TorchAttention:
    """Single-token sequences attend in batches, longer chunks one after another."""

    def __init__(self, metadata: AttentionMetadata) -> None:
        self._meta = metadata
        self._tables = metadata.block_tables.long()
        self._batches = list(self._plan_batches())
        self._chunks = list(self._plan_chunks())
        self._tails = self._plan_tails()

    def write(self, layer_kv: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> None:
        meta = self._meta
        layer_kv[meta.slot_blocks, 0, :, meta.slot_offsets] = key
        layer_kv[meta.slot_blocks, 1, :, meta.slot_offsets] = value
        if self._tails is not None:
            blocks, slots = self._tails
            layer_kv[blocks, :, :, slots] = 0

    def attend(self, query: torch.Tensor, layer_kv: torch.Tensor, scale: float) -> torch.Tensor:
        heads, head_dim = query.shape[1:]
        kv_heads = layer_kv.shape[2]
        output = torch.empty_like(query, memory_format=torch.contiguous_format)
        for start, end, table, padding in self._batches:
            # The query heads that share a KV head are its rows, so nothing is repeated.
            q = query[start:end].reshape(end - start, kv_heads, heads // kv_heads, head_dim)
            k, v = self._gather(layer_kv, table)
            attended = scaled_dot_product_attention(q, k, v, attn_mask=padding, scale=scale)
            output[start:end] = attended.reshape(end - start, heads, head_dim)
        for start, end, table, context_len, mask in self._chunks:
            q = query[start:end].transpose(0, 1)[None]
            k, v = self._gather(layer_kv, table)
            attended = scaled_dot_product_attention(
                q,
                k[:, :, :context_len],
                v[:, :, :context_len],
                attn_mask=mask,
                is_causal=mask is None,
                scale=scale,
                enable_gqa=True,
            )
            output[start:end] = attended[0].transpose(0, 1)
        return output

    def _gather(
        self, layer_kv: torch.Tensor, table: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values [sequences, kv_heads, tokens, head_dim] of a table of blocks."""
        blocks = layer_kv[table]  # [sequences, blocks, 2, kv_heads, slots, head_dim]
        k, v = blocks.permute(2, 0, 3, 1, 4, 5).flatten(3, 4)
        return k, v

    def _plan_batches(self) -> Iterator[tuple[int, int, torch.Tensor, torch.Tensor]]:
        """First and last single-token sequence, their blocks, and which gathered tokens count."""
        meta = self._meta
        start = 0
        while start < meta.single_count:
            end, longest = start, 0
            while end < meta.single_count:
                longest = max(longest, meta.context_lens_list[end])
                if end > start and (end + 1 - start) * longest > GATHERED_TOKENS:
                    break
                end += 1
            blocks = -(-max(meta.context_lens_list[start:end]) // meta.block_size)
            tokens = torch.arange(blocks * meta.block_size, device=self._tables.device)
            padding = tokens < meta.context_lens[start:end, None]
            table = self._tables[start:end, :blocks]
            own = padding[:, :: meta.block_size]  # blocks with a token; the others' are not its own
            yield start, end, table.where(own, table[:, :1]), padding[:, None, None]
            start = end

    def _plan_chunks(self) -> Iterator[tuple[int, int, torch.Tensor, int, torch.Tensor | None]]:
        """First and last row of each chunk, its blocks, its context and its mask (None: causal)."""
        meta = self._meta
        for row in range(meta.single_count, len(meta.context_lens_list)):
            first, last = meta.query_starts_list[row : row + 2]
            context_len = meta.context_lens_list[row]
            mask = None
            if last - first < context_len:
                positions = torch.arange(context_len, device=self._tables.device)
                mask = positions <= positions[first - last :, None]
            blocks = -(-context_len // meta.block_size)
            yield first, last, self._tables[row : row + 1, :blocks], context_len, mask

    def _plan_tails(self) -> tuple[torch.Tensor, torch.Tensor] | None:
        """Blocks and slots behind the last tokens of sequences that have just begun a block, or
        computed more than one token; None when there are none.
        """
        meta = self._meta
        tails = [
            (row, (context_len - 1) // meta.block_size, slot)
            for row, context_len in enumerate(meta.context_lens_list)
            if row >= meta.single_count or context_len % meta.block_size == 1
            for slot in range((context_len - 1) % meta.block_size + 1, meta.block_size)
        ]
        if not tails:
            return None
        rows, blocks, slots = torch.tensor(tails, device=self._tables.device).T
        return self._tables[rows, blocks], slots
