"""KV that has arrived."""

from dataclasses import dataclass


@dataclass(frozen=True)
class SealedTransfer:
    """KV of a prompt that is all there, and the token that prefill drew after it."""

    block_ids: tuple[int, ...]
    cached_block_count: int
    first_token: int
    logprob: float
    byte_count: int
