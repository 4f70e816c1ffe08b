"""Pairs of equally long segments, and cutting them into pieces."""

from collections.abc import Iterator, Sequence

import numpy as np

from epd.errors import TransferFailedError
from epd.transfer.base import Segment
from epd.transfer.segments import SegmentArray

Piece = tuple[SegmentArray, SegmentArray]


def check_pairs(local: Sequence[Segment], remote: Sequence[Segment]) -> None:
    """Refuses lists that do not match one to one.

    Raises:
        TransferFailedError: nothing to move, or counts or lengths differ.
    """
    if not local or len(local) != len(remote):
        raise TransferFailedError(
            f"{len(local)} local and {len(remote)} remote segments: they must pair up"
        )
    here, there = (SegmentArray.of(one).rows[:, 1] for one in (local, remote))
    wrong = (here != there) | (here < 1)
    if wrong.any():
        index = int(np.argmax(wrong))
        raise TransferFailedError(
            f"segment {index} has {here[index]} bytes here and {there[index]} there"
        )


def cut(local: Sequence[Segment], remote: Sequence[Segment], piece_bytes: int) -> Iterator[Piece]:
    """Yields runs of segment pairs of at most ``piece_bytes`` in all, cutting long segments.

    What is a piece already is left for the backend to check.

    Raises:
        TransferFailedError: lists to cut that do not pair up.
    """
    here, there = SegmentArray.of(local), SegmentArray.of(remote)
    if here.byte_count <= piece_bytes:
        yield here, there
        return
    check_pairs(here, there)
    if (here.rows[:, 1] > piece_bytes).any():
        here, there = _split(here, piece_bytes), _split(there, piece_bytes)
    ends = np.cumsum(here.rows[:, 1])
    first, sent = 0, 0
    while first < len(here):
        last = int(np.searchsorted(ends, sent + piece_bytes, side="right"))
        yield here[first:last], there[first:last]
        first, sent = last, int(ends[last - 1])


def _split(segments: SegmentArray, most_bytes: int) -> SegmentArray:
    """Every segment as parts of at most so many bytes."""
    addresses, lengths, devices = segments.rows.T
    counts = -(-lengths // most_bytes)
    offsets = most_bytes * (np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts))
    parts = np.minimum(np.repeat(lengths, counts) - offsets, most_bytes)
    return SegmentArray.at(
        np.repeat(addresses, counts) + offsets, parts, np.repeat(devices, counts)
    )
