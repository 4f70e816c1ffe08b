"""Whether a request's prompt is computed apart from its answer: what either way would cost."""

import enum
from dataclasses import dataclass

#: How much cheaper the other way must be, before requests of a size change sides.
MARGIN = 0.2


class Way(enum.Enum):
    """Where the prompt is computed."""

    #: On a prefill worker, which pushes the KV to the decode worker.
    REMOTE = "remote"
    #: On the decode worker, between the steps of what runs there.
    LOCAL = "local"

    @property
    def other(self) -> "Way":
        """The one that this one is not."""
        return Way.LOCAL if self is Way.REMOTE else Way.REMOTE


@dataclass(frozen=True)
class Costs:
    """Seconds of waiting that a request causes, its own and others'."""

    remote_s: float
    local_s: float

    def of(self, way: Way) -> float:
        """The cost of one way."""
        return self.remote_s if way is Way.REMOTE else self.local_s


def remote_cost_s(ttft_s: float, transfer_s: float) -> float:
    """The request waits for its first token, then for its KV; nobody else's tokens wait.

    Args:
        ttft_s: Queue and computation at the prefill worker.
        transfer_s: From the first token to the start of decode.
    """
    return ttft_s + transfer_s


def local_cost_s(waiting_s: float, compute_s: float, running: int) -> float:
    """The request waits for its first token, and so does every running answer for its next ones.

    Args:
        waiting_s: Prompts ahead of it at the decode worker.
        compute_s: Its own uncached tokens there.
        running: Answers in the batch, each held up by the computation.
    """
    return waiting_s + compute_s * (1 + running)


def size_class(uncached_tokens: int) -> int:
    """Prompts whose tokens to compute lie between the same powers of two are of one class."""
    return uncached_tokens.bit_length()


class Hysteresis:
    """Keeps to a way until the other is clearly cheaper, per size of prompt.

    Without it two ways of about equal cost would take turns with every request, and both
    predictions would chase each other's queue.
    """

    def __init__(self, margin: float = MARGIN) -> None:
        self._margin = margin
        self._ways: dict[int, Way] = {}

    def choose(self, costs: Costs, size: int) -> Way:
        """The way for prompts of a size class, see :func:`size_class`."""
        current = self._ways.get(size, Way.REMOTE)
        if costs.of(current.other) < costs.of(current) * (1 - self._margin):
            current = current.other
        self._ways[size] = current
        return current
