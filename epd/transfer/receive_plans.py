"""Which memory each peer may WRITE to now, on transports whose receiving end takes part."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from epd.errors import TransferFailedError
from epd.transfer.base import ReceivePlan, Segment
from epd.transfer.segments import Column, Rows, SegmentArray


@dataclass(frozen=True)
class _Spans:
    """Ranges of one device, sorted and never adjacent: where they begin and end."""

    begins: Column
    ends: Column

    @classmethod
    def of(cls, rows: Rows) -> "_Spans":
        rows = rows[np.argsort(rows[:, 0])]
        begins, ends = rows[:, 0], np.maximum.accumulate(rows[:, 0] + rows[:, 1])
        first = np.append(True, begins[1:] > ends[:-1])
        return cls(begins[first], ends[np.append(first[1:], True)])

    def hold(self, rows: Rows) -> bool:
        index = np.searchsorted(self.begins, rows[:, 0], side="right") - 1
        return bool(np.all((index >= 0) & (rows[:, 0] + rows[:, 1] <= self.ends[index])))


class ReceivePlans:
    """Plans of all peers. A WRITE must lie inside one of its sender's plans as a whole."""

    def __init__(self) -> None:
        self._plans: dict[int, tuple[str, dict[int, _Spans]]] = {}

    def add(self, plan: ReceivePlan) -> None:
        """From now on the peer may WRITE there."""
        rows = SegmentArray.of(plan.segments).rows
        spans = {
            int(device): _Spans.of(rows[rows[:, 2] == device]) for device in np.unique(rows[:, 2])
        }
        self._plans[plan.plan_id] = (plan.agent_name, spans)

    def remove(self, plan_id: int) -> None:
        """The peer may not WRITE there any more; an unknown plan is fine."""
        self._plans.pop(plan_id, None)

    def plan_for(self, agent_name: str, segments: Sequence[Segment]) -> int:
        """The plan that a peer's WRITE belongs to.

        Raises:
            TransferFailedError: it may not write there (any more).
        """
        rows = SegmentArray.of(segments).rows
        devices = [int(device) for device in np.unique(rows[:, 2])]
        for plan_id, (name, spans) in self._plans.items():
            if name == agent_name and all(
                device in spans and spans[device].hold(rows[rows[:, 2] == device])
                for device in devices
            ):
                return plan_id
        raise TransferFailedError(f"{agent_name} holds no reservation for this WRITE")

    def holds(self, plan_id: int) -> bool:
        """Whether a plan is still in force."""
        return plan_id in self._plans
