"""Which workers a request goes to. Pure functions over what is known at this moment."""

import random
from collections.abc import Sequence
from typing import Protocol

from services.router.workers import Worker

#: Predicted times that differ by less than either are equal: a prediction is no better than that.
TIE_SHARE = 0.2
TIE_S = 0.005


class Addressed(Protocol):
    """Something that work can be sent to, with a name that outlives its restarts."""

    @property
    def load(self) -> int:
        """Work there or on its way."""
        ...

    @property
    def address(self) -> str:
        """host:port."""
        ...


def cheapest(costs: Sequence[float], loads: Sequence[int], rng: random.Random) -> int:
    """Position of the least cost; among equal costs of the least load; then by chance.

    Args:
        costs: Predicted times in seconds, at least one.
        loads: Requests there, in the same order.
        rng: Breaks ties.
    """
    least = min(costs)
    limit = max(least * (1 + TIE_SHARE), least + TIE_S)
    tied = [position for position, cost in enumerate(costs) if cost <= limit]
    load = min(loads[position] for position in tied)
    return rng.choice([position for position in tied if loads[position] == load])


def uncached_tokens(tokens: int, held_blocks: int, block_size: int) -> int:
    """Tokens of a prompt left to compute: a token must be, or there is nothing to draw from."""
    return max(1, tokens - held_blocks * block_size)


def without(workers: Sequence[Worker], avoid: frozenset[str]) -> Sequence[Worker]:
    """Workers whose instance is not to be avoided; all when that leaves none."""
    return [worker for worker in workers if worker.info.instance_id not in avoid] or workers


def closed(workers: Sequence[Worker]) -> Sequence[Worker]:
    """Workers whose circuit breaker lets a request through; all when none does.

    A worker that failed lately is better than none, so a breaker never refuses a request.
    """
    return [worker for worker in workers if worker.breaker.allows] or workers


def pairing_partners(prefill: Worker, decodes: Sequence[Worker]) -> list[Worker]:
    """Decode workers that KV of the prefill worker fits."""
    return [decode for decode in decodes if decode.info.pairing == prefill.info.pairing]
