"""Transfers that have ended, remembered for a while so that late calls are refused."""

from collections import OrderedDict
from collections.abc import Callable

from epd.errors import EpdError


class Tombstones:
    """Why each of the last ``limit`` transfers ended, for ``keep_s`` seconds each."""

    def __init__(self, limit: int, keep_s: float, clock_ns: Callable[[], int]) -> None:
        self._limit = limit
        self._keep_ns = int(keep_s * 1e9)
        self._clock_ns = clock_ns
        self._ended: OrderedDict[str, tuple[int, EpdError]] = OrderedDict()  # oldest first

    def __len__(self) -> int:
        return len(self._ended)

    def put(self, transfer_id: str, error: EpdError) -> None:
        """Remembers an end; the first reason given stays."""
        if transfer_id not in self._ended:
            self._ended[transfer_id] = (self._clock_ns(), error)
        self.prune()

    def get(self, transfer_id: str) -> EpdError | None:
        """Why a transfer ended, or None when it is not known to have."""
        found = self._ended.get(transfer_id)
        return found[1] if found else None

    def prune(self) -> None:
        """Forgets what is too old or too much."""
        oldest_kept = self._clock_ns() - self._keep_ns
        while self._ended:
            transfer_id, (ended_ns, _) = next(iter(self._ended.items()))
            if ended_ns >= oldest_kept and len(self._ended) <= self._limit:
                return
            del self._ended[transfer_id]
