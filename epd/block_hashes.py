"""Content hashes of full KV blocks, chained: what workers cache by and routers look for.

The KV of a block is decided by everything before it, its own tokens, and the content of the images
its placeholders stand for. The hash covers exactly that, so equal hashes mean equal KV.
"""

import struct
from collections.abc import Sequence
from typing import Protocol

from blake3 import blake3


class HashedImage(Protocol):
    """An image's run of placeholder tokens: where it starts, how long it is, what it shows."""

    @property
    def offset(self) -> int:
        """Index of the first placeholder."""
        ...

    @property
    def length(self) -> int:
        """Number of placeholders."""
        ...

    @property
    def digest(self) -> bytes:
        """Content digest, 32 bytes."""
        ...


ROOT = blake3(b"epd.v1 kv block chain").digest()


def block_hashes(
    token_ids: Sequence[int],
    images: Sequence[HashedImage],
    block_size: int,
    known: Sequence[bytes] = (),
) -> list[bytes]:
    """Hashes of all full blocks of ``token_ids``, 32 bytes each.

    ``known`` are the leading blocks' hashes from an earlier call; they are not computed again.
    ``images`` must be sorted by offset and not overlap.
    """
    hashes = list(known)
    for start in range(len(hashes) * block_size, len(token_ids) - block_size + 1, block_size):
        end = start + block_size
        hasher = blake3(hashes[-1] if hashes else ROOT)
        hasher.update(struct.pack(f"<{block_size}I", *token_ids[start:end]))
        for image in images:
            if image.offset < end and image.offset + image.length > start:
                # The signed distance says which part of the image lies in this block.
                hasher.update(struct.pack("<qq", image.offset - start, image.length))
                hasher.update(image.digest)
        hashes.append(hasher.digest())
    return hashes
