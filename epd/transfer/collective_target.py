"""The end of a collective pair that takes part in a peer's transfers."""

import collections
import logging
from collections.abc import Callable

import torch

from epd.errors import TransferFailedError
from epd.transfer.collective_message import GroupInvitation, Kind, Move, number_body, read_number
from epd.transfer.lane import LaneCall
from epd.transfer.pair_group import PairGroup
from epd.transfer.receive_plans import ReceivePlans
from epd.transfer.registered_memory import RegisteredMemory
from epd.transfer.segments import SegmentArray
from epd.transfer.staging import gather, new_staging, scatter
from epd.transfer.wire import Wire

log = logging.getLogger(__name__)

#: Transfers of one peer that have their staging memory at once; the others wait.
MAX_ACTIVE = 4
MAX_WAITING = 1024
MAX_TRANSFER_BYTES = 64 << 20


class _Part:
    """This end's half of one transfer; ``plan_id`` is None for a READ."""

    def __init__(self, move: Move, plan_id: int | None, staging: torch.Tensor, call: LaneCall):
        self.move = move
        self.plan_id = plan_id
        self.staging = staging
        self.call = call


class CollectiveTarget:
    """Serves one connection that a peer has made. Agent thread only.

    A WRITE is received beside its target and copied there on the agent thread, and only while its
    receive plan is in force: memory whose reservation has ended is never touched again.

    Args:
        peer: Name of the peer.
        wire: The connection.
        memory: This agent's.
        plans: Where peers may WRITE.
        join_group: Joins the peer's group.
        deliver: Called with each notice of a transfer that has landed.
    """

    def __init__(
        self,
        peer: str,
        wire: Wire,
        memory: RegisteredMemory,
        plans: ReceivePlans,
        join_group: Callable[[GroupInvitation], PairGroup],
        deliver: Callable[[str, bytes], None],
    ) -> None:
        self._peer = peer
        self._wire = wire
        self._memory = memory
        self._plans = plans
        self._join_group = join_group
        self._deliver = deliver
        self._group: PairGroup | None = None
        self._waiting: collections.deque[tuple[int, Move]] = collections.deque()
        self._active: dict[int, _Part] = {}

    def take(self, kind: int, body: bytes) -> None:
        """Takes a frame in. Raises TransferFailedError: it makes no sense, end the connection."""
        if kind == Kind.GROUP and self._group is None:
            self._group = self._join_group(GroupInvitation.decode(body))
        elif kind in (Kind.OFFER, Kind.ASK):
            move = Move.decode(body)
            if len(self._waiting) >= MAX_WAITING:
                self._refuse(move, f"{MAX_WAITING} transfers wait already")
            else:
                self._waiting.append((kind, move))
        elif kind == Kind.FETCHED:
            number, _ = read_number(body)
            part = self._active.get(number)
            if part is None or part.plan_id is not None:
                raise TransferFailedError(f"READ {number} is not under way")
            del self._active[number]
            self._announce(part)
        else:
            raise TransferFailedError(f"a frame of kind {kind} is not expected")

    def advance(self) -> None:
        """Does what can be done without waiting. Raises TransferFailedError: the pair is broken."""
        if self._group is None:
            return
        if self._group.failure is not None:
            raise TransferFailedError(f"no group with the peer: {self._group.failure}")
        while self._waiting and self._group.ready and len(self._active) < MAX_ACTIVE:
            self._start(*self._waiting.popleft(), self._group)
        for number, part in list(self._active.items()):
            if not part.call.done:
                continue
            if part.call.error is not None:
                raise TransferFailedError(part.call.error)
            if part.plan_id is not None:
                del self._active[number]
                self._land(part, part.plan_id)

    def close(self) -> None:
        """Ends the pair."""
        self._waiting.clear()
        self._active.clear()
        if self._group is not None:
            self._group.close()
            self._group = None

    def _start(self, kind: int, move: Move, group: PairGroup) -> None:
        plan_id = None
        try:
            self._memory.check(move.segments)
            byte_count = SegmentArray.of(move.segments).byte_count
            if not 0 < byte_count <= MAX_TRANSFER_BYTES:
                raise TransferFailedError(
                    f"a transfer of {byte_count} bytes, {MAX_TRANSFER_BYTES} are allowed"
                )
            if kind == Kind.OFFER:
                plan_id = self._plans.plan_for(self._peer, move.segments)
        except TransferFailedError as error:
            self._refuse(move, error.message)
            return
        if plan_id is not None:
            staging = new_staging(move.segments, group.device)
            call = group.receive(staging, move.number)
        else:
            staging = gather(move.segments, self._memory, group.device)
            call = group.send(staging, move.number)
        self._active[move.number] = _Part(move, plan_id, staging, call)
        self._wire.send(Kind.ACCEPT, number_body(move.number))

    def _land(self, part: _Part, plan_id: int) -> None:
        if not self._plans.holds(plan_id):
            self._refuse(part.move, "the reservation ended while the data was on its way")
            return
        scatter(part.staging, part.move.segments, self._memory)
        self._announce(part)
        self._wire.send(Kind.LANDED, number_body(part.move.number))

    def _announce(self, part: _Part) -> None:
        if part.move.notice:
            self._deliver(self._peer, part.move.notice)

    def _refuse(self, move: Move, reason: str) -> None:
        log.warning("transfer of %s refused: %s", self._peer, reason)
        self._wire.send(Kind.REFUSED, number_body(move.number, reason))
