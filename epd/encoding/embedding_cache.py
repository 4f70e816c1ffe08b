"""Embeddings in one registered arena, findable by the content of their image.

Every entry is in one of three accounts: *in use* (being filled, or pinned by a reader),
*quarantined* (no pin, but a reader may still be at it) or *idle* (kept in case its image comes
again; evictable).
The capacity bounds what is kept: idle entries take at most what the others of cacheable size leave
of it. The arena is larger: the rest is working memory for entries in use beyond that, such as an
embedding larger than the whole capacity, which is served like any other and dropped after its last
pin. With capacity 0 nothing is ever kept.
"""

import enum
from collections.abc import Callable, Sequence

from epd.encoding.embedding import EmbeddingSpec
from epd.encoding.eviction_policy import EvictionPolicy
from epd.errors import EpdError, InvalidRequestError, ResourceExhaustedError
from epd.transfer.arena import Arena, ByteRange


class EntryState(enum.Enum):
    """FILLING → READY, or FILLING → WITHDRAWN (failed or abandoned; memory still written to)."""

    FILLING = "filling"
    READY = "ready"
    WITHDRAWN = "withdrawn"


class CacheEntry:
    """One embedding's memory and who needs it. Changed by :class:`EmbeddingCache` only."""

    def __init__(self, digest: bytes, spec: EmbeddingSpec, memory: ByteRange, size: int) -> None:
        self.digest = digest
        self.spec = spec
        self.memory = memory
        #: Bytes taken from the arena.
        self.size = size
        self.state = EntryState.FILLING
        #: Readers with a live lease.
        self.pins = 0
        #: Readers that went without a word and may still read.
        self.holds = 0

    @property
    def idle(self) -> bool:
        """Whether nobody needs it."""
        return self.state is EntryState.READY and not self.pins and not self.holds


class EmbeddingCache:
    """The accounts. Owned by the event loop; plain bookkeeping, touches no embedding.

    Args:
        arena: Ranges of the registered memory; all of it belongs to this cache.
        capacity_bytes: Most bytes kept for later.
        policy: Order in which idle entries go.
        on_abandoned: Called with a FILLING entry that nobody waits for any more, just withdrawn:
            stop filling it, then :meth:`discard` it.
    """

    def __init__(
        self,
        arena: Arena,
        capacity_bytes: int,
        policy: EvictionPolicy,
        on_abandoned: Callable[[CacheEntry], None],
    ) -> None:
        self._on_abandoned = on_abandoned
        self._arena = arena
        self._policy = policy
        self._entries: dict[bytes, CacheEntry] = {}
        self._withdrawn: set[CacheEntry] = set()
        self._inserted: set[bytes] = set()  # keys the policy knows
        self.capacity_bytes = capacity_bytes
        self.idle_bytes = 0
        self.quarantined_bytes = 0
        self._cacheable_bytes = 0  # of findable entries that fit into the capacity
        self.evictions = 0

    @property
    def total_bytes(self) -> int:
        """Bytes of the whole arena."""
        return self._arena.capacity_bytes

    @property
    def free_bytes(self) -> int:
        """Bytes in no entry."""
        return self._arena.free_bytes

    @property
    def in_use_bytes(self) -> int:
        """Bytes being filled or pinned."""
        return self._arena.used_bytes - self.idle_bytes - self.quarantined_bytes

    def find(self, digest: bytes) -> CacheEntry | None:
        """The entry of an image, READY or FILLING; counts as a use."""
        self._policy.touch(digest)
        return self._entries.get(digest)

    def claim(self, wanted: Sequence[tuple[bytes, EmbeddingSpec]]) -> list[CacheEntry]:
        """New FILLING entries for images that have none: memory for all of them, or for none.

        Raises:
            InvalidRequestError: so much could never be held at once.
            ResourceExhaustedError: the memory in use leaves no room; idle entries were evicted only
                when that could have helped.
        """
        sizes = [self._rounded(spec.byte_count) for _, spec in wanted]
        if sum(sizes) > self.free_bytes + self.idle_bytes:
            raise self._no_room(sum(sizes))
        self._trim(sum(size for size in sizes if size <= self.capacity_bytes))
        lengths = [spec.byte_count for _, spec in wanted]
        while (granted := self._arena.allocate_all(lengths)) is None:
            if not self._evict_one():  # enough bytes, but in pieces that are too small
                raise self._no_room(sum(sizes))
        entries = []
        for (digest, spec), memory, size in zip(wanted, granted, sizes, strict=True):
            assert digest not in self._entries
            entry = CacheEntry(digest, spec, memory, size)
            self._add(entry)
            entries.append(entry)
        return entries

    def complete(self, entry: CacheEntry) -> None:
        """FILLING → READY: the embedding is in place and sound."""
        assert entry.state is EntryState.FILLING
        assert entry.pins
        entry.state = EntryState.READY

    def withdraw(self, entry: CacheEntry) -> None:
        """FILLING → WITHDRAWN: no longer findable; the memory stays until :meth:`discard`."""
        assert entry.state is EntryState.FILLING
        entry.state = EntryState.WITHDRAWN
        self._remove(entry)
        self._withdrawn.add(entry)

    def discard(self, entry: CacheEntry) -> None:
        """Frees the memory of a WITHDRAWN entry, once nobody writes to it any more."""
        self._withdrawn.remove(entry)
        self._arena.free(entry.memory)

    def pin(self, entry: CacheEntry) -> None:
        """One more reader: the entry stays where it is."""
        assert entry.state is not EntryState.WITHDRAWN
        self._change(entry, pins=1)

    def unpin(self, entry: CacheEntry) -> None:
        """A reader is done; with its last one a FILLING entry is withdrawn."""
        assert entry.pins
        self._change(entry, pins=-1)
        if entry.state is EntryState.FILLING and not entry.pins:
            self.withdraw(entry)
            self._on_abandoned(entry)

    def quarantine(self, entry: CacheEntry) -> None:
        """A reader is gone, but its READ may still run."""
        assert entry.pins
        self._change(entry, pins=-1, holds=1)

    def settle(self, entry: CacheEntry) -> None:
        """The READ of a reader in quarantine has certainly ended."""
        assert entry.holds
        self._change(entry, holds=-1)

    def check_integrity(self) -> None:
        """Asserts that the accounts add up to the arena's and that the capacity is kept."""
        self._arena.check_integrity()
        entries = [*self._entries.values(), *self._withdrawn]
        assert sum(entry.size for entry in entries) == self._arena.used_bytes
        idle = [entry for entry in entries if entry.idle]
        assert sum(entry.size for entry in idle) == self.idle_bytes
        quarantined = [entry for entry in entries if _is_quarantined(entry)]
        assert sum(entry.size for entry in quarantined) == self.quarantined_bytes
        assert {entry.digest for entry in idle} <= self._inserted <= self._entries.keys()
        sizes = [entry.size for entry in self._entries.values()]
        assert sum(n for n in sizes if n <= self.capacity_bytes) == self._cacheable_bytes
        assert self.idle_bytes == 0 or self._cacheable_bytes <= self.capacity_bytes
        for digest, entry in self._entries.items():
            assert entry.digest == digest
            assert entry.pins or entry.state is EntryState.READY

    def _change(self, entry: CacheEntry, pins: int = 0, holds: int = 0) -> None:
        """Every change of an entry's readers goes through here, so the accounts follow."""
        self._count(entry, -1)
        entry.pins += pins
        entry.holds += holds
        self._count(entry, 1)
        if not entry.idle:
            return
        if entry.size > self.capacity_bytes:
            self._drop(entry)
            return
        if entry.digest not in self._inserted:
            self._policy.insert(entry.digest, entry.size)
            self._inserted.add(entry.digest)
        self._trim(0)

    def _count(self, entry: CacheEntry, sign: int) -> None:
        if entry.idle:
            self.idle_bytes += sign * entry.size
        elif _is_quarantined(entry):
            self.quarantined_bytes += sign * entry.size

    def _add(self, entry: CacheEntry) -> None:
        self._entries[entry.digest] = entry
        self._cacheable_bytes += entry.size if entry.size <= self.capacity_bytes else 0

    def _remove(self, entry: CacheEntry) -> None:
        del self._entries[entry.digest]
        self._cacheable_bytes -= entry.size if entry.size <= self.capacity_bytes else 0

    def _trim(self, coming_bytes: int) -> None:
        """Evicts until what is here and what is coming keeps the capacity, if eviction can."""
        while self.idle_bytes and self._cacheable_bytes + coming_bytes > self.capacity_bytes:
            self._evict_one()

    def _evict_one(self) -> bool:
        digest = self._policy.evict(lambda key: self._entries[key].idle)
        if digest is None:
            return False
        self._inserted.discard(digest)
        self.evictions += 1
        self._drop(self._entries[digest])
        return True

    def _drop(self, entry: CacheEntry) -> None:
        self._count(entry, -1)
        self._remove(entry)
        if entry.digest in self._inserted:
            self._policy.remove(entry.digest)
            self._inserted.discard(entry.digest)
        self._arena.free(entry.memory)

    def _rounded(self, byte_count: int) -> int:
        return -(-byte_count // self._arena.alignment) * self._arena.alignment

    def _no_room(self, wanted: int) -> EpdError:
        if wanted > self.total_bytes:
            return InvalidRequestError(
                f"the embeddings take {wanted} bytes and the encoder has {self.total_bytes}",
                field="images",
                reason="IMAGES_EXCEED_MEMORY",
            )
        return ResourceExhaustedError(
            f"{wanted} bytes of embedding memory wanted, {self.free_bytes + self.idle_bytes} of "
            f"{self.total_bytes} are free or evictable",
            reason="EMBEDDING_MEMORY",
            retry_after_s=0.1,
        )


def _is_quarantined(entry: CacheEntry) -> bool:
    return entry.state is EntryState.READY and not entry.pins and entry.holds > 0
