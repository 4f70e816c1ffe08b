"""Bounds of the collective transport."""

from dataclasses import dataclass


@dataclass(frozen=True)
class CollectiveOptions:
    """``timeout_s``: longest wait for a peer's half of a send or receive, or for it to join; a pair
    on which more passes is given up.
    """

    timeout_s: float = 30.0
