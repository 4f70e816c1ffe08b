"""Runs the language half of a model over a batch of token runs."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from epd.engine.attention import AttentionFactory, AttentionMetadata, PagedStep
from epd.engine.families.base import LanguageModules, ModelFamily
from epd.engine.kv_cache import KVCache
from epd.engine.layer_events import LayerEvents
from epd.engine.requests import PromptImage


@dataclass(frozen=True)
class TokenRun:
    """Tokens ``start`` to ``end`` of a sequence, of which all earlier ones have their KV.

    ``token_ids`` is the whole sequence up to ``end`` at least, and ``block_ids`` cover it.
    ``images`` and ``embeddings`` (one tensor per image) may be left out after the last image.
    """

    token_ids: Sequence[int]
    start: int
    end: int
    block_ids: Sequence[int]
    #: Whether logits after the last token are wanted.
    sample: bool
    images: Sequence[PromptImage] = ()
    embeddings: Sequence[torch.Tensor] = ()
    position_delta: int = 0

    @property
    def length(self) -> int:
        """Number of tokens to compute."""
        return self.end - self.start


class LanguageRunner:
    """Embeds tokens and images, runs the layers over the paged KV, projects the last tokens.

    Driven by one thread. Holds no state between calls but weights and KV. ``layer_events``: on a
    device that runs behind its host.
    """

    def __init__(
        self,
        family: ModelFamily,
        modules: LanguageModules,
        kv_cache: KVCache,
        attention: AttentionFactory,
        layer_events: LayerEvents | None = None,
    ) -> None:
        self.family = family
        self.kv_cache = kv_cache
        self._modules = modules
        self._attention = attention
        self._layer_events = layer_events
        self._device = kv_cache.tensor.device
        self._block_size = kv_cache.layout.block_size

    @torch.inference_mode()
    def run(
        self,
        runs: Sequence[TokenRun],
        layer_written: Callable[[int], None] | None = None,
        before_layer: Callable[[int], None] | None = None,
    ) -> torch.Tensor:
        """Writes the KV of all runs; returns logits [runs with ``sample``, vocabulary] in float32.

        Runs of one token must come first. ``before_layer`` and ``layer_written`` are called once
        per layer, in order, the latter when the layer's KV is in the pool; what the former raises
        ends the step.
        """
        if self._layer_events is None or layer_written is None:
            return self._forward(runs, layer_written, before_layer)
        try:
            return self._forward(runs, self._layer_events.follow(layer_written), before_layer)
        finally:
            self._layer_events.finish()

    def _forward(
        self,
        runs: Sequence[TokenRun],
        layer_written: Callable[[int], None] | None,
        before_layer: Callable[[int], None] | None,
    ) -> torch.Tensor:
        attention = self._attention(self._metadata(runs))
        step = PagedStep(self.kv_cache.layers, attention, layer_written, before_layer)
        embedded, levels = self._embed(runs)
        hidden: torch.Tensor = self._modules.body(
            inputs_embeds=embedded[None],
            position_ids=self._positions(runs),
            use_cache=False,
            paged_step=step,
            **levels,
        ).last_hidden_state[0]
        ends = accumulate(run.length for run in runs)
        last = [end - 1 for run, end in zip(runs, ends, strict=True) if run.sample]
        logits: torch.Tensor = self._modules.lm_head(hidden[last])
        return logits.float()

    def finish(self) -> None:
        """Waits until the device has done all it was asked to, after a step that was ended."""
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)

    def _embed(self, runs: Sequence[TokenRun]) -> tuple[torch.Tensor, dict[str, Any]]:
        """Embeddings [tokens, hidden] with those of images in place, and arguments for levels."""
        token_ids = [token for run in runs for token in run.token_ids[run.start : run.end]]
        embedded: torch.Tensor = self._modules.embed_tokens(
            torch.tensor(token_ids, device=self._device)
        )
        base = 0
        placed: list[tuple[torch.Tensor, torch.Tensor]] = []
        for run in runs:
            for image, embedding in zip(run.images, run.embeddings, strict=True):
                placed += self._image_rows(base, run, image, embedding)
            base += run.length
        if not placed:
            return embedded, {}
        rows = torch.cat([rows for rows, _ in placed])
        features = torch.cat([found for _, found in placed]).to(embedded)
        embedded[rows], *levels = torch.split(features, self.family.hidden_size, dim=1)
        if not levels or not len(rows):
            return embedded, {}
        return embedded, self.family.level_arguments(rows, torch.stack(levels), len(token_ids))

    def _image_rows(
        self, base: int, run: TokenRun, image: PromptImage, embedding: torch.Tensor
    ) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """The step's rows that the run's part of an image takes, with their features.

        ``base`` is the row of the run's first token. Placeholders that take no embedding (row ends,
        separators) keep their own.
        """
        low, high = max(image.offset, run.start), min(image.offset + image.length, run.end)
        if low >= high:
            return []
        ids = np.asarray(run.token_ids[image.offset : high])
        takers = np.flatnonzero(np.isin(ids, self.family.embedding_token_ids)) + image.offset
        skipped = int(np.searchsorted(takers, low))  # rows that earlier runs have taken
        rows = torch.from_numpy(takers[skipped:] - run.start + base).to(self._device)
        return [(rows, embedding[skipped : len(takers)].to(self._device))]

    def _positions(self, runs: Sequence[TokenRun]) -> torch.Tensor:
        """[1, tokens], or [axes, 1, tokens] with multimodal rope."""
        parts = [
            self.family.positions(run.token_ids, run.images, run.position_delta, run.start, run.end)
            for run in runs
        ]
        positions = self._tensor(np.concatenate(parts, axis=1))
        return positions if self.family.position_axes == 1 else positions[:, None]

    def _metadata(self, runs: Sequence[TokenRun]) -> AttentionMetadata:
        lengths = [run.length for run in runs]
        single_count = sum(length == 1 for length in lengths)
        assert all(length == 1 for length in lengths[:single_count]), "single tokens come first"
        context_lens = [run.end for run in runs]
        query_starts = [0, *accumulate(lengths)]
        used = [-(-end // self._block_size) for end in context_lens]
        tables = np.zeros((len(runs), max(used)), dtype=np.int32)
        for row, (run, count) in enumerate(zip(runs, used, strict=True)):
            tables[row, :count] = run.block_ids[:count]
        sequence = np.repeat(np.arange(len(runs)), lengths)
        index = np.concatenate([np.arange(run.start, run.end) for run in runs])
        return AttentionMetadata(
            block_size=self._block_size,
            slot_blocks=self._tensor(tables[sequence, index // self._block_size].astype(np.int64)),
            slot_offsets=self._tensor(index % self._block_size),
            block_tables=self._tensor(tables),
            context_lens=self._tensor(np.asarray(context_lens, dtype=np.int32)),
            query_starts=self._tensor(np.asarray(query_starts, dtype=np.int32)),
            context_lens_list=context_lens,
            query_starts_list=query_starts,
            single_count=single_count,
        )

    def _tensor(self, array: npt.NDArray[Any]) -> torch.Tensor:
        return torch.from_numpy(array).to(self._device)
