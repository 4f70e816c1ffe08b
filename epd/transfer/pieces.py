"""Pairs of equally long segments, and cutting them into pieces."""

from collections.abc import Iterator, Sequence

from epd.errors import TransferFailedError
from epd.transfer.base import Segment

Piece = tuple[list[Segment], list[Segment]]


def check_pairs(local: Sequence[Segment], remote: Sequence[Segment]) -> None:
    """Refuses lists that do not match one to one.

    Raises:
        TransferFailedError: nothing to move, or counts or lengths differ.
    """
    if not local or len(local) != len(remote):
        raise TransferFailedError(
            f"{len(local)} local and {len(remote)} remote segments: they must pair up"
        )
    for index, (here, there) in enumerate(zip(local, remote, strict=True)):
        if here.length != there.length or here.length < 1:
            raise TransferFailedError(
                f"segment {index} has {here.length} bytes here and {there.length} there"
            )


def cut(local: Sequence[Segment], remote: Sequence[Segment], piece_bytes: int) -> Iterator[Piece]:
    """Yields runs of segment pairs of at most ``piece_bytes`` in all, cutting long segments."""
    here: list[Segment] = []
    there: list[Segment] = []
    room = piece_bytes
    for source, target in zip(local, remote, strict=True):
        offset = 0
        while offset < source.length:
            taken = min(room, source.length - offset)
            here.append(Segment(source.address + offset, taken, source.device_id))
            there.append(Segment(target.address + offset, taken, target.device_id))
            offset += taken
            room -= taken
            if not room:
                yield here, there
                here, there, room = [], [], piece_bytes
    if here:
        yield here, there
