"""Deadlines travel as durations: each hop passes on what is left."""

from epd.errors import DeadlineExceededError
from epd.rpc.aliases import ServicerContext


def remaining_s(context: ServicerContext, default_s: float) -> float:
    """Seconds left for onward calls: the caller's deadline, at most ``default_s``.

    Raises:
        DeadlineExceededError: nothing is left.
    """
    left_s = context.time_remaining()
    if left_s is None:
        return default_s
    if left_s <= 0:
        raise DeadlineExceededError("the call's deadline has passed")
    return min(left_s, default_s)
