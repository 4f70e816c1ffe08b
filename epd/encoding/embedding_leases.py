"""Handles: who may read which embedding, and until when."""

import logging
import secrets
from collections.abc import Callable, Iterable

from epd.encoding.embedding_cache import CacheEntry, EmbeddingCache, EntryState

logger = logging.getLogger(__name__)


class _Lease:
    """A pin (``expires_s`` ahead, None while the Encode call is open) or, later, a quarantine."""

    def __init__(self, entry: CacheEntry) -> None:
        self.entry = entry
        self.expires_s: float | None = None
        self.quarantined = False
        #: A reader has said that it READs. What comes before that is not used, see EncoderLeases.
        self.has_reader = False
        #: The attempt it was granted to, empty when nobody said.
        self.attempt_id = ""


class EmbeddingLeases:
    """Maps handle ids to pins of cache entries.

    A lease is open while the Encode call runs, then expires unless it is renewed. One that has a
    reader when it expires or is given back unsettled is in quarantine first, for the hold time or
    until the reader says that it is done. Lives on the event loop, like the cache.

    Args:
        cache: Whose entries are pinned.
        lease_s: How long a lease runs without a renewal.
        hold_s: How long memory stays in quarantine without a word from its reader.
        clock: Monotonic seconds.
    """

    def __init__(
        self, cache: EmbeddingCache, lease_s: float, hold_s: float, clock: Callable[[], float]
    ) -> None:
        self._cache = cache
        self._hold_s = hold_s
        self._clock = clock
        self._leases: dict[str, _Lease] = {}
        self.lease_s = lease_s
        self.expired = 0
        self.unknown_renewals = 0

    def __len__(self) -> int:
        return len(self._leases)

    @property
    def open_count(self) -> int:
        """Leases that somebody may still use, those in quarantine not counted. Any thread."""
        return sum(not lease.quarantined for lease in list(self._leases.values()))

    @property
    def readable(self) -> bool:
        """Whether some embedding may be READ now."""
        return any(
            lease.entry.state is EntryState.READY and not lease.quarantined
            for lease in self._leases.values()
        )

    def grant(self, entry: CacheEntry) -> str:
        """Pins an entry for an open Encode call; returns a random 128-bit id, hexadecimal."""
        handle_id = secrets.token_hex(16)
        self._cache.pin(entry)
        self._leases[handle_id] = _Lease(entry)
        return handle_id

    def assign(self, attempt_id: str, handle_ids: Iterable[str]) -> None:
        """Notes which attempt handles were granted to."""
        for handle_id in handle_ids:
            self._leases[handle_id].attempt_id = attempt_id

    def of_attempt(self, attempt_id: str) -> list[str]:
        """The handles an attempt still has."""
        if not attempt_id:
            return []
        return [key for key, lease in self._leases.items() if lease.attempt_id == attempt_id]

    def find(self, handle_id: str) -> CacheEntry | None:
        """The entry of a live lease."""
        lease = self._leases.get(handle_id)
        return None if lease is None or lease.quarantined else lease.entry

    def run(self, handle_ids: Iterable[str]) -> None:
        """The Encode call has ended well: from now on the leases expire."""
        for handle_id in handle_ids:
            if (lease := self._leases.get(handle_id)) is not None and not lease.quarantined:
                lease.expires_s = self._clock() + self.lease_s

    def renew(self, handle_ids: Iterable[str], *, reading: bool = False) -> list[str]:
        """Starts leases anew; returns the ids that have none, which are counted and logged.

        ``reading``: the caller is their reader.
        """
        unknown = []
        for handle_id in handle_ids:
            lease = self._leases.get(handle_id)
            if lease is None or lease.quarantined:
                unknown.append(handle_id)
                continue
            lease.has_reader = lease.has_reader or reading
            if lease.expires_s is not None:  # one of an open call does not run yet
                lease.expires_s = self._clock() + self.lease_s
        if unknown:
            self.unknown_renewals += len(unknown)
            logger.warning("renewal of %d unknown handles, first %s", len(unknown), unknown[0])
        return unknown

    def release(self, handle_ids: Iterable[str], *, settled: bool) -> list[str]:
        """Gives leases back; returns the ids that have none.

        ``settled`` means no READ runs or will be posted; without it an embedding that has a reader
        goes into quarantine. A second, settled release ends the quarantine.
        """
        unknown = []
        for handle_id in handle_ids:
            lease = self._leases.get(handle_id)
            if lease is None:
                unknown.append(handle_id)
            elif settled:
                self._end(handle_id, lease)
            elif not lease.quarantined:
                self._give_up(handle_id, lease)
        return unknown

    def expire(self) -> bool:
        """Quarantines what has run out and ends quarantines that have; called periodically.

        Returns whether anything changed.
        """
        now = self._clock()
        due = [
            (handle_id, lease)
            for handle_id, lease in self._leases.items()
            if lease.expires_s is not None and lease.expires_s <= now
        ]
        for handle_id, lease in due:
            if lease.quarantined:
                self._end(handle_id, lease)
            else:
                self.expired += 1
                logger.warning("lease of handle %s has expired", handle_id)
                self._give_up(handle_id, lease)
        return bool(due)

    def _give_up(self, handle_id: str, lease: _Lease) -> None:
        """Ends a lease without its reader's word."""
        if not lease.has_reader or lease.entry.state is not EntryState.READY:
            self._end(handle_id, lease)
            return
        lease.quarantined = True
        lease.expires_s = self._clock() + self._hold_s
        self._cache.quarantine(lease.entry)

    def _end(self, handle_id: str, lease: _Lease) -> None:
        del self._leases[handle_id]
        if lease.quarantined:
            self._cache.settle(lease.entry)
        else:
            self._cache.unpin(lease.entry)
