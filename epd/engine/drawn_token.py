"""What a draw comes to. Plain Python, no torch."""

from dataclasses import dataclass

from epd.sampling import TopLogprobs


@dataclass(frozen=True)
class DrawnToken:
    """A token with its log probability before penalties, temperature, filters and suppression.

    ``top`` holds the likeliest tokens at its place, on the same scale, when asked for.
    """

    token_id: int
    logprob: float
    top: TopLogprobs | None = None
