"""What a prefill worker tells decode workers about its pushes."""

import asyncio
import logging
import time
from collections.abc import Awaitable, Sequence

from epd.cleanup import CleanupTasks
from epd.errors import EpdError
from epd.handover.control import PushTarget
from epd.handover.push import KvPush
from epd.handover.settlements import Settlements

log = logging.getLogger(__name__)


class PushControl:
    """Announce, Fail, Renew and Settle, each bounded in time; what decode must learn is told until
    it knows.

    Lives on the event loop.
    """

    def __init__(self, timeout_s: float, max_unsettled: int) -> None:
        self.settlements = Settlements(max_unsettled)
        self.tasks = CleanupTasks()
        self._timeout_s = timeout_s
        #: Transfers whose Settle is on its way.
        self._telling: set[str] = set()

    def fail(self, target: PushTarget, transfer_id: str, error: EpdError, settled: bool) -> None:
        """Tells decode at once why a transfer failed, in the background. When that does not get
        through, a Settle ends the transfer there: the one to come, or, where ``settled`` says that
        there is nothing to wait for (a Reserve that was given up), one that is owed from then on.
        """

        async def tell() -> None:
            call = target.control.fail(transfer_id, error, settled)
            if not await self._bounded(target, "Fail", call) and settled:
                self.settlements.add(target, transfer_id)

        self.tasks.spawn(tell())

    def announce(self, push: KvPush, first_token: int) -> None:
        """Tells decode the first token ahead of the seal, in the background. When that does not get
        through, decode waits for the seal.
        """

        async def tell() -> None:
            call = push.target.control.announce(
                push.transfer_id, push.reservation.generation, first_token, push.writes_per_layer
            )
            await self._bounded(push.target, "Announce", call)

        self.tasks.spawn(tell())

    async def settle(self, target: PushTarget, transfer_ids: list[str]) -> None:
        """Tells decode that no WRITE of the transfers runs or will be posted; each is told once."""
        owed = self.settlements.owed(target, transfer_ids)
        telling = [one for one in owed if one not in self._telling]
        if not telling:
            return
        self._telling.update(telling)
        try:
            if await self._bounded(target, "Settle", target.control.settle(telling)):
                self.settlements.done(target, telling)
        finally:
            self._telling.difference_update(telling)

    async def renew(self, pushes: Sequence[KvPush]) -> list[KvPush]:
        """Renews the leases of one target; returns the pushes that decode has given up.

        When the call fails nothing is renewed: leases lapse by themselves when that goes on.
        """
        target = pushes[0].target
        asked_ns = time.monotonic_ns()
        unknown: set[str] = set()

        async def ask() -> None:
            unknown.update(await target.control.renew([push.transfer_id for push in pushes]))

        if not await self._bounded(target, "Renew", ask()):
            return []
        for push in pushes:
            if push.transfer_id not in unknown:
                push.renewed(asked_ns)
        return [push for push in pushes if push.transfer_id in unknown]

    async def _bounded(self, target: PushTarget, what: str, call: Awaitable[None]) -> bool:
        """Makes a control call; False when it failed."""
        try:
            async with asyncio.timeout(self._timeout_s):
                await call
        except (EpdError, TimeoutError) as error:
            log.warning("%s at decode instance %s failed: %r", what, target.instance_id, error)
            return False
        return True
