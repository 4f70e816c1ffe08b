"""KV that still arrives."""

from dataclasses import dataclass

from epd.engine.kv_arrival import KvArrival


@dataclass(frozen=True)
class ArrivingTransfer:
    """KV of a prompt that is on its way, and the token that prefill drew after it.

    The blocks are lent: whatever becomes of the transfer, nobody else gets them before they are
    given back.
    """

    block_ids: tuple[int, ...]
    first_token: int
    arrival: KvArrival
