"""When a failed attempt is worth another one, and when a lost answer was complete already."""

from collections.abc import Sequence
from dataclasses import dataclass

from epd.errors import (
    EpdError,
    LayoutMismatchError,
    NotFoundError,
    ResourceExhaustedError,
    TransferFailedError,
    UnavailableError,
)
from epd.sampling import FinishReason

#: Another worker, or the same one anew, may well succeed. NOT_FOUND means that a worker was
#: restarted or a handle has lapsed, a layout mismatch that the pair does not fit.
_ELSEWHERE = (UnavailableError, TransferFailedError, NotFoundError, LayoutMismatchError)


@dataclass(frozen=True)
class RetryPolicy:
    """Bounds on attempts. Only the router retries, so these are all attempts there are.

    Args:
        max_attempts: Failed attempts after which a request fails.
        backoff_s: Wait before the second retry; doubles with each further one.
        max_backoff_s: Longest wait.
    """

    max_attempts: int
    backoff_s: float
    max_backoff_s: float

    def may_retry(
        self, error: EpdError, *, failures: int, exhausted: int, alternatives: bool, started: bool
    ) -> bool:
        """Whether to try again.

        Args:
            error: Why the last attempt failed.
            failures: Failed attempts, this one included.
            exhausted: How many of them failed for lack of room.
            alternatives: Whether there is a worker that has not failed this request yet.
            started: Whether the client has tokens of the answer already.
        """
        if failures >= self.max_attempts:
            return False
        if isinstance(error, ResourceExhaustedError):
            # Before the first token the client may decide for itself; others are tried once.
            # An answer that has begun is worth waiting for.
            return started or (alternatives and exhausted == 1)
        return isinstance(error, _ELSEWHERE)

    def wait_s(self, failures: int) -> float:
        """Wait before the next attempt: none after the first failure."""
        if failures < 2:
            return 0.0
        return min(self.backoff_s * 2.0 ** (failures - 2), self.max_backoff_s)


def lost_finish(
    token_ids: Sequence[int],
    *,
    max_tokens: int,
    room: int,
    end_ids: frozenset[int],
) -> FinishReason | None:
    """Whether an answer was over already when its worker was lost before saying so.

    Args:
        token_ids: All tokens of the answer so far.
        max_tokens: The request's limit.
        room: Tokens that fit between prompt and context length.
        end_ids: Tokens that end this answer.
    """
    if token_ids and token_ids[-1] in end_ids:
        return FinishReason.STOP
    return FinishReason.LENGTH if len(token_ids) >= min(max_tokens, room) else None
