"""Which memory each peer may WRITE to now, on transports whose receiving end takes part."""

import bisect
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from epd.errors import TransferFailedError
from epd.transfer.base import ReceivePlan, Segment


@dataclass(frozen=True)
class _Spans:
    """Ranges of one device, sorted, never adjacent: begins and ends."""

    begins: list[int]
    ends: list[int]

    @classmethod
    def of(cls, segments: Iterable[Segment]) -> "_Spans":
        begins: list[int] = []
        ends: list[int] = []
        for begin, length in sorted((one.address, one.length) for one in segments):
            if ends and begin <= ends[-1]:
                ends[-1] = max(ends[-1], begin + length)
            else:
                begins.append(begin)
                ends.append(begin + length)
        return cls(begins, ends)

    def hold(self, segment: Segment) -> bool:
        index = bisect.bisect_right(self.begins, segment.address) - 1
        return index >= 0 and segment.address + segment.length <= self.ends[index]


class ReceivePlans:
    """Plans of all peers. A WRITE must lie inside one of its sender's plans as a whole."""

    def __init__(self) -> None:
        self._plans: dict[int, tuple[str, dict[int, _Spans]]] = {}

    def add(self, plan: ReceivePlan) -> None:
        """From now on the peer may WRITE there."""
        by_device: dict[int, list[Segment]] = {}
        for segment in plan.segments:
            by_device.setdefault(segment.device_id, []).append(segment)
        spans = {device: _Spans.of(segments) for device, segments in by_device.items()}
        self._plans[plan.plan_id] = (plan.agent_name, spans)

    def remove(self, plan_id: int) -> None:
        """The peer may not WRITE there any more; an unknown plan is fine."""
        self._plans.pop(plan_id, None)

    def plan_for(self, agent_name: str, segments: Sequence[Segment]) -> int:
        """The plan that a peer's WRITE belongs to.

        Raises:
            TransferFailedError: it may not write there (any more).
        """
        for plan_id, (name, spans) in self._plans.items():
            if name == agent_name and all(
                one.device_id in spans and spans[one.device_id].hold(one) for one in segments
            ):
                return plan_id
        raise TransferFailedError(f"{agent_name} holds no reservation for this WRITE")

    def holds(self, plan_id: int) -> bool:
        """Whether a plan is still in force."""
        return plan_id in self._plans
