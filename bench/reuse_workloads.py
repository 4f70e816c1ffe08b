"""Synthetic sequences of images that come again. No public trace has repeated images."""

import random
import tracemalloc
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
    cache = _cache(policy, capacity_bytes)
    answers = [_serve(cache, image) for image in images]
    return sum(answers) / len(answers)


def account_bytes(policy: PolicyName, images: int = 2000) -> float:
    """Memory that the accounts of one kept embedding take, the embedding itself not counted."""
    cache = _cache(policy, images * SIZES[0])
    tracemalloc.start()
    try:
        for image in range(images):
            _serve(cache, image * len(SIZES))
        taken, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    return taken / images


def _cache(policy: PolicyName, capacity_bytes: int) -> EmbeddingCache:
    arena = Arena(capacity_bytes + max(SIZES))
    return EmbeddingCache(
        arena, capacity_bytes, make_policy(policy, capacity_bytes), lambda entry: None
    )


def _serve(cache: EmbeddingCache, image: int) -> bool:
    """One request for one image; whether it hit."""
    digest = image.to_bytes(32)
    found = cache.find(digest)
    if found is not None:
        entry = found
        cache.pin(entry)
    else:
        (entry,) = cache.claim([(digest, _spec(SIZES[image % len(SIZES)]))])
        cache.pin(entry)
        cache.complete(entry)
    cache.unpin(entry)
    return found is not None


def _spec(byte_count: int) -> EmbeddingSpec:
    plan = ImagePlan((1, 2, 2), 0, (0,), 0, 1)
    return EmbeddingSpec(plan, (1, byte_count // 4), "float32")
