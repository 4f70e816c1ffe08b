"""Which processes a fleet has."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

ROLES = ("encoder", "prefill", "decode", "router")


@dataclass(frozen=True)
class FleetPlan:
    """Counts and flags. ``unified`` workers are decode processes that serve requests alone.

    ``flags`` are added per role, ``worker_flags`` per process name such as ``decode-1``;
    ``environment`` is added to this process's own.
    """

    model: Path
    encoders: int = 1
    prefills: int = 1
    decodes: int = 1
    unified: int = 0
    router_port: int = 0
    http_port: int = 0
    flags: Mapping[str, Sequence[str]] = field(default_factory=dict)
    worker_flags: Mapping[str, Sequence[str]] = field(default_factory=dict)
    environment: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if min(self.encoders, self.prefills, self.decodes, self.unified) < 0:
            raise ValueError("counts of workers are 0 or more")
        if not self.unified and not (self.prefills and self.decodes):
            raise ValueError("a fleet needs prefill and decode workers, or unified ones")
        if bool(self.prefills) != bool(self.decodes):
            raise ValueError("prefill workers need decode workers, and the reverse")

    @property
    def process_count(self) -> int:
        """Processes in all, the router included."""
        return self.encoders + self.prefills + self.decodes + self.unified + 1

    def flags_of(self, role: str, name: str) -> list[str]:
        """Extra flags of one process, its own last so that they win."""
        return [*self.flags.get(role, ()), *self.worker_flags.get(name, ())]
