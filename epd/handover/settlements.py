"""Settles that decode workers have not confirmed yet."""

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from epd.handover.control import PushTarget

log = logging.getLogger(__name__)


@dataclass
class _Owed:
    target: PushTarget
    connected: bool = True
    #: From when on each may be told, in order of arrival.
    transfer_ids: dict[str, float] = field(default_factory=dict)


class Settlements:
    """Transfers that are through here, per decode process, until that process knows.

    Decode keeps a failed transfer's memory in quarantine until then, so none may be forgotten
    while its process may come back: a lost connection only pauses delivery. Owned by the loop.

    Args:
        limit: Most transfers kept per process.
        max_lost: Most lost processes remembered; the one lost first is given up.
        clock: Seconds, monotonic.
    """

    def __init__(
        self, limit: int, max_lost: int = 64, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._limit = limit
        self._max_lost = max_lost
        self._clock = clock
        self._owed: dict[str, _Owed] = {}

    def __len__(self) -> int:
        return sum(len(owed.transfer_ids) for owed in self._owed.values())

    def add(self, target: PushTarget, transfer_id: str, in_s: float = 0.0) -> None:
        """Notes that a transfer is through, or will be in so many seconds."""
        owed = self._owed.setdefault(target.instance_id, _Owed(target))
        owed.transfer_ids[transfer_id] = self._clock() + in_s
        if len(owed.transfer_ids) > self._limit:
            oldest = next(iter(owed.transfer_ids))
            del owed.transfer_ids[oldest]
            log.error("gave up telling %s that %s is settled", target.instance_id, oldest)

    def due(self) -> list[tuple[PushTarget, list[str]]]:
        """What connected processes have still to be told."""
        now = self._clock()
        found = [
            (owed.target, [one for one, since in owed.transfer_ids.items() if since <= now])
            for owed in self._owed.values()
            if owed.connected
        ]
        return [(target, transfer_ids) for target, transfer_ids in found if transfer_ids]

    def owed(self, target: PushTarget, transfer_ids: list[str]) -> list[str]:
        """Those of some transfers that the process does not know of yet, and may."""
        found = self._owed.get(target.instance_id)
        since = found.transfer_ids if found is not None else {}
        now = self._clock()
        return [one for one in transfer_ids if one in since and since[one] <= now]

    def done(self, target: PushTarget, transfer_ids: list[str]) -> None:
        """The process knows."""
        owed = self._owed.get(target.instance_id)
        if owed is None:
            return
        for transfer_id in transfer_ids:
            owed.transfer_ids.pop(transfer_id, None)
        if not owed.transfer_ids and owed.connected:
            del self._owed[target.instance_id]

    def connected(self, target: PushTarget) -> None:
        """The process can be reached (again), now through this target."""
        owed = self._owed.pop(target.instance_id, None)
        if owed is not None and owed.transfer_ids:
            self._owed[target.instance_id] = _Owed(target, True, owed.transfer_ids)

    def lost(self, target: PushTarget) -> None:
        """The process cannot be reached for now."""
        owed = self._owed.pop(target.instance_id, _Owed(target))
        owed.connected = False
        self._owed[target.instance_id] = owed  # to the end: lost last
        gone = [name for name, one in self._owed.items() if not one.connected]
        for name in gone[: -self._max_lost]:
            del self._owed[name]
