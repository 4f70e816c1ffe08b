"""Which KV heads a tensor-parallel rank holds, and which of them it writes to which other rank.

Pure functions of head count, degrees and ranks, so that both sides come to the same plan without
a message. With more ranks than heads neighbouring ranks hold copies of one head; a latent (MLA) is
one head of which every rank holds a copy. Of copies one writer is chosen for each reader, another
one for the next, so that they share the work. Plain Python.
"""

from epd.errors import LayoutMismatchError


def rank_heads(head_count: int, degree: int, rank: int) -> range:
    """The heads of a rank.

    Raises:
        LayoutMismatchError: the heads cannot be shared out evenly, or there is no such rank.
    """
    if degree < 1 or not 0 <= rank < degree:
        raise LayoutMismatchError(f"there is no tensor-parallel rank {rank} of {degree}")
    fewer, more = sorted((head_count, degree))
    if head_count < 1 or more % fewer:
        raise LayoutMismatchError(
            f"{head_count} KV heads cannot be shared out evenly to {degree} ranks"
        )
    first = rank * head_count // degree
    return range(first, first + max(1, head_count // degree))


def written_heads(head_count: int, writer: tuple[int, int], reader: tuple[int, int]) -> range:
    """The heads that a writing rank sends to a reading rank; each is (degree, rank).

    Every head of every reader comes from exactly one writer.

    Raises:
        LayoutMismatchError: as :func:`rank_heads`.
    """
    mine, theirs = rank_heads(head_count, *writer), rank_heads(head_count, *reader)
    copies = max(1, writer[0] // head_count)
    if writer[1] % copies != reader[1] % copies:
        return range(0)
    return range(max(mine.start, theirs.start), min(mine.stop, theirs.stop))


def writers_of(head_count: int, degree: int, reader: tuple[int, int]) -> dict[int, range]:
    """Whom a reading rank hears from: the heads of each of ``degree`` writing ranks that has any.

    Raises:
        LayoutMismatchError: as :func:`rank_heads`.
    """
    plan = {rank: written_heads(head_count, (degree, rank), reader) for rank in range(degree)}
    return {rank: heads for rank, heads in plan.items() if heads}
