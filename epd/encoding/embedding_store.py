"""The registered memory of a process's embeddings, what lies in it, and who may read it."""

import asyncio
import time
from collections.abc import Callable

import numpy as np
import numpy.typing as npt
import torch

from epd.encoding.embedding_cache import CacheEntry, EmbeddingCache, EntryState
from epd.encoding.embedding_leases import EmbeddingLeases
from epd.encoding.encode_batcher import embedding_tensor
from epd.encoding.encode_events import EmbeddingHandle
from epd.encoding.encoding_config import EncodingConfig
from epd.encoding.eviction_policy import make_policy
from epd.errors import NotFoundError
from epd.transfer.arena import Arena
from epd.transfer.base import Segment
from epd.transfer.buffer import HostBuffer

EXPIRY_PERIOD_S = 0.05


class EmbeddingStore:
    """Joins memory, cache accounts and leases. Lives on one event loop.

    Args:
        config: Sizes and times; the memory is allocated here.
        on_abandoned: See :class:`EmbeddingCache`.
    """

    def __init__(self, config: EncodingConfig, on_abandoned: Callable[[CacheEntry], None]) -> None:
        self._buffer = HostBuffer(config.arena_bytes)
        self.cache = EmbeddingCache(
            Arena(config.arena_bytes),
            config.embedding_cache_bytes,
            make_policy(config.embedding_policy, config.embedding_cache_bytes),
            on_abandoned,
        )
        self.leases = EmbeddingLeases(
            self.cache, config.embedding_lease_s, config.embedding_hold_s, time.monotonic
        )

    @property
    def segment(self) -> Segment:
        """The whole memory, for registration."""
        return self._buffer.segment

    def view(self, entry: CacheEntry) -> npt.NDArray[np.uint8]:
        """The bytes of an entry, without a copy."""
        return self._buffer.view(entry.memory.offset, entry.memory.length)

    def handle(self, handle_id: str, entry: CacheEntry) -> EmbeddingHandle:
        """What a reader is told about an entry that is leased to it."""
        return EmbeddingHandle(
            handle_id,
            entry.digest,
            self._buffer.part(entry.memory.offset, entry.memory.length),
            entry.spec,
            self.leases.lease_s,
        )

    def embedding(self, handle_id: str) -> torch.Tensor:
        """The embedding of a handle, [tokens, features]; valid until its release.

        Raises:
            NotFoundError: there is no such lease, or nothing ready behind it.
        """
        entry = self.leases.find(handle_id)
        if entry is None or entry.state is not EntryState.READY:
            raise NotFoundError(f"no embedding under handle {handle_id}", reason="HANDLE_UNKNOWN")
        return embedding_tensor(self.view(entry), entry.spec)

    async def expire(self, changed: Callable[[], None]) -> None:
        """Ends leases and quarantines at their time, until cancelled; tells when some have."""
        while True:
            await asyncio.sleep(EXPIRY_PERIOD_S)
            if self.leases.expire():
                changed()
