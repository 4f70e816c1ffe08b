"""Memory with a lease: renewed, expired, released, quarantined."""

import asyncio

import pytest

from epd.encoding.embedding import EmbeddingSpec
from epd.encoding.embedding_cache import EmbeddingCache
from epd.encoding.embedding_leases import EmbeddingLeases
from epd.encoding.embedding_store import EXPIRY_PERIOD_S
from epd.encoding.eviction_policy import LruPolicy
from epd.engine.families.base import ImagePlan
from epd.errors import (
    NotFoundError,
)
from epd.transfer.arena import Arena
from tests.encoder.calls import Caller
from tests.encoder.conftest import MakeEncoder
from tests.encoder.watched import ONE, file, until


async def test_lease_of_a_reader_expires_into_quarantine_and_then_frees(
    make_encoder: MakeEncoder, caller: Caller
) -> None:
    encoder = await make_encoder(
        embedding_cache_bytes=0, embedding_lease_s=1.5, embedding_hold_s=2.0
    )
    now_s = 0.0
    encoder._store.leases._clock = lambda: now_s  # stands still while this machine does
    answer = await caller.encode(encoder, file(0))
    assert encoder.stats().in_use_bytes == ONE
    for _ in range(3):  # longer than the lease
        now_s += 1.0
        await asyncio.sleep(2 * EXPIRY_PERIOD_S)
        assert encoder.renew(answer.handle_ids, reading=True) == []
    now_s += 1.6
    await until(lambda: encoder.stats().quarantined_bytes == ONE)
    assert encoder.stats().in_use_bytes == 0
    assert encoder.renew(answer.handle_ids) == answer.handle_ids
    assert (encoder.stats().expired_leases, encoder.stats().unknown_renewals) == (1, 1)
    with pytest.raises(NotFoundError):
        encoder.embedding(answer.handle_ids[0])
    now_s += 1.9
    await asyncio.sleep(2 * EXPIRY_PERIOD_S)
    assert encoder.stats().quarantined_bytes == ONE
    now_s += 0.2
    await until(lambda: encoder.stats().quarantined_bytes == 0)
    assert encoder.stats().used_bytes == 0


async def test_unsettled_release_is_quarantined_until_the_reader_confirms(
    make_encoder: MakeEncoder, caller: Caller
) -> None:
    encoder = await make_encoder(embedding_cache_bytes=0)
    answer = await caller.encode(encoder, file(0))
    encoder.renew(answer.handle_ids, reading=True)
    assert encoder.release(answer.handle_ids, settled=False) == []
    assert encoder.stats().quarantined_bytes == ONE
    assert encoder.release(answer.handle_ids, settled=True) == []
    assert encoder.stats().quarantined_bytes == encoder.stats().used_bytes == 0
    assert encoder.release(answer.handle_ids, settled=True) == answer.handle_ids
    assert encoder.release(["never seen"], settled=False) == ["never seen"]


async def test_memory_without_reader_is_free_at_once(
    make_encoder: MakeEncoder, caller: Caller
) -> None:
    """A request that was cancelled before its prefill worker had heard of it (F10, F12)."""
    encoder = await make_encoder(embedding_cache_bytes=0)
    answer = await caller.encode(encoder, file(0))
    assert encoder.renew(answer.handle_ids) == []  # the router's word is no READ
    assert encoder.release(answer.handle_ids, settled=False) == []
    assert encoder.stats().quarantined_bytes == encoder.stats().used_bytes == 0
    # A reader that comes too late learns it, and does not count what it has read.
    assert encoder.renew(answer.handle_ids, reading=True) == answer.handle_ids


def test_leases_are_counted_by_another_thread_while_they_come_and_go() -> None:
    """Metrics are scraped on a thread of their own."""
    spec = EmbeddingSpec(ImagePlan((1, 2, 2), 1, (1,), 0, 1), (1, 8), "float32")
    cache = EmbeddingCache(Arena(4096), 4096, LruPolicy(), lambda entry: None)
    leases = EmbeddingLeases(cache, 1.0, 1.0, lambda: 0.0)
    (entry,) = cache.claim([(bytes(32), spec)])
    leases.grant(entry)

    class ComingAndGoing:
        """Looked at, it does what the event loop may do at that very moment."""

        @property
        def quarantined(self) -> bool:
            leases.grant(entry)
            return True

    leases._leases = {"first": ComingAndGoing(), **leases._leases}  # type: ignore[dict-item]
    assert leases.open_count == 1
    del leases._leases["first"]
    assert leases.open_count == 2
