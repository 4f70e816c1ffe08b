"""Long lists of segments without an object for each."""

from collections.abc import Sequence
from typing import overload

import numpy as np
import numpy.typing as npt

from epd.transfer.base import Segment

#: int64 [segments, 3]: address, length in bytes, device ordinal.
Rows = npt.NDArray[np.int64]
Column = npt.NDArray[np.int64]


class SegmentArray(Sequence[Segment]):
    """Segments as the rows of one array. A push has one segment for each run of blocks and layer,
    thousands in all: as objects they cost more than the copy.
    """

    def __init__(self, rows: Rows) -> None:
        assert rows.ndim == 2
        assert rows.shape[1] == 3
        self.rows = rows

    @classmethod
    def of(cls, segments: Sequence[Segment]) -> "SegmentArray":
        """The same segments as an array; an array is returned as it is."""
        if isinstance(segments, cls):
            return segments
        rows = [(one.address, one.length, one.device_id) for one in segments]
        return cls(np.array(rows, dtype=np.int64).reshape(-1, 3))

    @classmethod
    def at(
        cls, addresses: Column, lengths: Column | int, device_ids: Column | int
    ) -> "SegmentArray":
        """One segment for each address."""
        rows = np.empty((len(addresses), 3), dtype=np.int64)
        rows[:, 0], rows[:, 1], rows[:, 2] = addresses, lengths, device_ids
        return cls(rows)

    def with_last(self, segment: Segment) -> "SegmentArray":
        """One more."""
        rows = np.empty((len(self.rows) + 1, 3), dtype=np.int64)
        rows[:-1] = self.rows
        rows[-1] = segment.address, segment.length, segment.device_id
        return SegmentArray(rows)

    @property
    def byte_count(self) -> int:
        """Bytes of all segments."""
        return int(self.rows[:, 1].sum())

    def __len__(self) -> int:
        return len(self.rows)

    @overload
    def __getitem__(self, index: int) -> Segment: ...
    @overload
    def __getitem__(self, index: slice) -> "SegmentArray": ...
    def __getitem__(self, index: int | slice) -> "Segment | SegmentArray":
        if isinstance(index, slice):
            return SegmentArray(self.rows[index])
        return Segment(*self.rows[index].tolist())
