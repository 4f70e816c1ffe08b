"""Reservations that wait for decode memory, holding nothing."""

import asyncio
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass

from epd.errors import EpdError, ResourceExhaustedError
from epd.handover.lease import Lease


@dataclass
class _Waiter:
    peer: str
    grant: Callable[[], Lease | None]
    granted: asyncio.Future[Lease]
    callers: int = 0


class ReserveQueue:
    """First come, first served: nobody overtakes a large reservation for ever.

    Owned by the event loop. :meth:`serve` must be called when memory may have become free.
    """

    def __init__(self, max_waiting: int, timeout_s: float) -> None:
        self._max_waiting = max_waiting
        self._timeout_s = timeout_s
        self._waiting: OrderedDict[str, _Waiter] = OrderedDict()

    def __len__(self) -> int:
        return len(self._waiting)

    async def wait(self, transfer_id: str, peer: str, grant: Callable[[], Lease | None]) -> Lease:
        """Waits until ``grant`` grants; a second call for the same transfer joins the first.

        Raises:
            ResourceExhaustedError: the queue is full, or the wait has passed its bound.
            EpdError: what ``grant`` or :meth:`drop` says.
        """
        waiter = self._waiting.get(transfer_id)
        if waiter is None:
            if not self._waiting and (lease := grant()) is not None:
                return lease
            if len(self._waiting) >= self._max_waiting:
                raise ResourceExhaustedError(
                    f"{len(self._waiting)} reservations wait for KV blocks, "
                    f"the limit is {self._max_waiting}",
                    reason="QUEUE_FULL",
                )
            waiter = _Waiter(peer, grant, asyncio.get_running_loop().create_future())
            self._waiting[transfer_id] = waiter
        waiter.callers += 1
        try:
            async with asyncio.timeout(self._timeout_s):
                # Shielded: a repeated call may wait for the same future.
                return await asyncio.shield(waiter.granted)
        except TimeoutError:
            error = ResourceExhaustedError(
                f"no KV blocks became free in {self._timeout_s} s", reason="NO_BLOCKS"
            )
            self.drop(transfer_id, error)
            raise error from None
        finally:
            waiter.callers -= 1
            if not waiter.callers and self._waiting.get(transfer_id) is waiter:
                del self._waiting[transfer_id]

    def serve(self) -> None:
        """Grants from the front for as long as memory lasts."""
        while self._waiting:
            transfer_id, waiter = next(iter(self._waiting.items()))
            try:
                lease = waiter.grant()
            except EpdError as error:
                self.drop(transfer_id, error)
                continue
            if lease is None:
                return
            del self._waiting[transfer_id]
            waiter.granted.set_result(lease)

    def drop(self, transfer_id: str, error: EpdError) -> None:
        """Refuses one that waits; an unknown id is fine."""
        waiter = self._waiting.pop(transfer_id, None)
        if waiter is not None and not waiter.granted.done():
            waiter.granted.set_exception(error)
            waiter.granted.exception()  # whoever timed out first does not fetch it

    def drop_peer(self, peer: str, error: EpdError) -> None:
        """Refuses everything that one writer waits for."""
        for transfer_id in [key for key, one in self._waiting.items() if one.peer == peer]:
            self.drop(transfer_id, error)
