"""Pairs of equally long segments, and cutting them into pieces."""

from collections.abc import Iterator, Sequence
from itertools import pairwise

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
    wrong = np.flatnonzero((here != there) | (here < 1))
    if len(wrong):
        index = wrong[0]
        raise TransferFailedError(
            f"segment {index} has {here[index]} bytes here and {there[index]} there"
        )


def cut(local: Sequence[Segment], remote: Sequence[Segment], piece_bytes: int) -> Iterator[Piece]:
    """Yields runs of segment pairs of at most ``piece_bytes`` in all, cutting long segments."""
    here, there = SegmentArray.of(local), SegmentArray.of(remote)
    lengths = here.rows[:, 1]
    ends = np.cumsum(lengths)
    total = int(ends[-1])
    if total <= piece_bytes:
        yield here, there
        return
    # Positions in the bytes of all segments, one after another.
    piece_starts = np.arange(0, total, piece_bytes)
    starts = np.union1d(piece_starts, ends[:-1])
    whole = np.searchsorted(ends, starts, side="right")  # which segment each part is of
    offsets = starts - (ends[whole] - lengths[whole])
    part_lengths = np.diff(starts, append=total)
    parts = tuple(
        SegmentArray.at(rows[whole, 0] + offsets, part_lengths, rows[whole, 2])
        for rows in (here.rows, there.rows)
    )
    bounds = [*np.searchsorted(starts, piece_starts), len(starts)]
    for first, last in pairwise(bounds):
        yield parts[0][first:last], parts[1][first:last]
