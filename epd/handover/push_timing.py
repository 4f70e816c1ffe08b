"""How much of a push was hidden behind the forward pass. Pure."""

from collections.abc import Sequence


def hidden_ns(intervals: Sequence[tuple[int, int]], forward_ended_ns: int) -> int:
    """Time before ``forward_ended_ns`` in which at least one WRITE ran.

    ``intervals``: (start, end) of each WRITE on the same monotonic clock, in any order.
    """
    total, covered = 0, 0
    for start, end in sorted(intervals):
        start, end = max(start, covered), min(end, forward_ended_ns)
        if end > start:
            total += end - start
            covered = end
    return total


def exposed_ns(intervals: Sequence[tuple[int, int]], forward_ended_ns: int) -> int:
    """Time from the end of the forward pass to the end of the last WRITE, gaps included."""
    return max(0, max((end for _, end in intervals), default=0) - forward_ended_ns)
