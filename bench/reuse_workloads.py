"""Synthetic sequences of images that come again. No public trace has repeated images."""

import random
from collections import deque
from collections.abc import Iterator
from itertools import accumulate

from epd.encoding.embedding import EmbeddingSpec
from epd.encoding.embedding_cache import EmbeddingCache
from epd.encoding.eviction_policy import PolicyName, make_policy
from epd.engine.families.base import ImagePlan
from epd.transfer.arena import Arena

#: Bytes of an embedding: small, medium and large images.
SIZES = (64 << 10, 256 << 10, 1 << 20)


def zipf_with_one_hit_wonders(requests: int, seed: int) -> Iterator[int]:
    """Half of the requests take one of 2000 images by Zipf's law, the others one never seen."""
    generator = random.Random(seed)
    ranks = range(1, 2001)
    cumulative = list(accumulate(1 / rank for rank in ranks))
    for number in range(requests):
        if generator.random() < 0.5:
            yield generator.choices(ranks, cum_weights=cumulative)[0]
        else:
            yield 10_000 + number


def chat_window(requests: int, seed: int, chats: int = 64) -> Iterator[int]:
    """Chats take turns at random; each turn brings an image and sends the last five again.

    One image in ten is the last of its chat, and another chat takes its place.
    """
    generator = random.Random(seed)
    windows: list[deque[int]] = [deque(maxlen=5) for _ in range(chats)]
    sent = 0
    while sent < requests:
        window = generator.choice(windows)
        if generator.random() < 0.1:
            window.clear()
        window.append(generator.getrandbits(62))
        for image in window:
            yield image
            sent += 1


WORKLOADS = {"zipf": zipf_with_one_hit_wonders, "chat_window": chat_window}


def hit_rate(policy: PolicyName, images: Iterator[int], capacity_bytes: int) -> float:
    """Share of the images that the real cache accounts find, one request at a time."""
    arena = Arena(capacity_bytes + max(SIZES))
    cache = EmbeddingCache(
        arena, capacity_bytes, make_policy(policy, capacity_bytes), lambda entry: None
    )
    hits = queries = 0
    for image in images:
        queries += 1
        digest = image.to_bytes(32)
        entry = cache.find(digest)
        if entry is not None:
            hits += 1
            cache.pin(entry)
        else:
            (entry,) = cache.claim([(digest, _spec(SIZES[image % len(SIZES)]))])
            cache.pin(entry)
            cache.complete(entry)
        cache.unpin(entry)
    return hits / queries


def _spec(byte_count: int) -> EmbeddingSpec:
    plan = ImagePlan((1, 2, 2), 0, (0,), 0, 1)
    return EmbeddingSpec(plan, (1, byte_count // 4), "float32")
