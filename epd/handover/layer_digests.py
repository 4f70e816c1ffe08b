"""End-to-end checksums of a prompt's KV, one per layer. For debugging: every byte is hashed."""

from collections.abc import Callable, Sequence

from blake3 import blake3

from epd.handover.block_runs import BlockSlice

#: Bytes of one layer's digest.
DIGEST_BYTES = 16

#: The bytes of one block of one layer on the host: (layer, block).
BlockReader = Callable[[int, int], bytes]


def reader_of_slices(
    read_block: BlockReader, slices: Sequence[BlockSlice], *, written: bool
) -> BlockReader:
    """Reads, of each block, only what one rank writes to another where their heads differ.

    Writer (``written``) and reader each read their own block; the bytes are the same, in the same
    order, once the WRITE has landed. A reader with several writers has digests from each.
    """

    def read(layer: int, block: int) -> bytes:
        whole = read_block(layer, block)
        starts = [one.local_offset if written else one.remote_offset for one in slices]
        return b"".join(
            whole[start : start + one.length] for start, one in zip(starts, slices, strict=True)
        )

    return read


class LayerDigests:
    """Digests over blocks in prompt order, whichever chunks they come in.

    Both sides hash the blocks that are pushed, not the cached ones before them, and all of the last
    block: the unused slots of a partly filled one travel too.
    """

    def __init__(self, layer_count: int, read_block: BlockReader) -> None:
        self._hashers = [blake3() for _ in range(layer_count)]
        self._read_block = read_block

    def update(self, layer: int, blocks: Sequence[int]) -> None:
        """Adds the next blocks of a layer; they must be final. Any thread, one at a time."""
        for block in blocks:
            self._hashers[layer].update(self._read_block(layer, block))

    def digests(self) -> tuple[bytes, ...]:
        """One digest per layer."""
        return tuple(hasher.digest(DIGEST_BYTES) for hasher in self._hashers)


def differing_layers(
    expected: Sequence[bytes], blocks: Sequence[int], read_block: BlockReader
) -> list[int]:
    """Layers whose bytes here are not the ones that were sent. Slow: not for an event loop."""
    found = LayerDigests(len(expected), read_block)
    for layer in range(len(expected)):
        found.update(layer, blocks)
    return [
        layer
        for layer, pair in enumerate(zip(expected, found.digests(), strict=True))
        if pair[0] != pair[1]
    ]
