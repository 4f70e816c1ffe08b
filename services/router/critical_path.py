"""Where the time of a request went: stages that do not overlap, and an honest rest."""

import time
from collections.abc import Mapping

ROUTER_PREPROCESS = "router.preprocess"
ROUTER_QUEUE = "router.queue"
ROUTER_DISPATCH = "router.dispatch"
ROUTER_DOWNLOAD = "router.image_download"
EARLIER_ATTEMPTS = "router.earlier_attempts"
KV_HANDOVER = "kv_handover"
ROUTER_FINISH = "router.finish"
UNATTRIBUTED = "unattributed"


class CriticalPath:
    """Collects stage durations of one request, in nanoseconds of the router's monotonic clock.

    Windows (from sending a call to its answer) are measured here; what happened inside them is told
    by the workers as durations, because clocks of different hosts are never compared. By how much a
    window is longer than the worker's own account of it is ``<service>.rpc``: gRPC, network, and
    event loops that are busy. What neither the worker's stages nor the router's explain stays
    unattributed.
    """

    def __init__(self) -> None:
        self._started_ns = time.monotonic_ns()
        self._first_token_ns: int | None = None
        self._answered_ns: int | None = None
        self._stages: dict[str, int] = {}
        self._kept: dict[str, int] = {}

    @property
    def ttft_ns(self) -> int:
        """From arrival to the first token; 0 while there is none."""
        return self._first_token_ns or 0

    def elapsed_ns(self) -> int:
        """Time since the request arrived."""
        return time.monotonic_ns() - self._started_ns

    def add(self, stage: str, duration_ns: int) -> None:
        """Adds a stage's time."""
        self._stages[stage] = self._stages.get(stage, 0) + max(0, duration_ns)

    def add_window(
        self, service: str, reported_ns: Mapping[str, int], service_ns: int, window_ns: int
    ) -> None:
        """Adds a worker's stages as ``service.stage``, cut to the window they happened in.

        Args:
            service: The worker's role.
            reported_ns: Its stages.
            service_ns: Its own account of the whole window; 0 where it gives none.
            window_ns: The window as it was seen from here.
        """
        left = min(service_ns or window_ns, window_ns)
        self.add(f"{service}.rpc", window_ns - left)
        for stage, duration_ns in reported_ns.items():
            self.add(f"{service}.{stage}", min(duration_ns, left))
            left -= min(duration_ns, left)

    def first_token(self) -> None:
        """Marks the first token of the answer; later calls change nothing."""
        if self._first_token_ns is None:
            self._first_token_ns = self.elapsed_ns()

    def answered(self, at_ns: int) -> None:
        """The last stage of a worker ended at ``at_ns``: what follows is the router's own."""
        self._answered_ns = at_ns

    def begin_attempt(self) -> None:
        """Stages added from here on belong to an attempt that may fail."""
        self._answered_ns = None
        self._kept = dict(self._stages)
        self._attempt_started_ns = time.monotonic_ns()

    def attempt_failed(self) -> None:
        """Replaces the stages of the failed attempt by one that says so."""
        self._stages = self._kept
        self._answered_ns = None
        self.add(EARLIER_ATTEMPTS, time.monotonic_ns() - self._attempt_started_ns)

    def stages_ns(self) -> dict[str, int]:
        """All stages in order and the rest of the time until now."""
        now_ns = time.monotonic_ns()
        stages = dict(self._stages)
        if self._answered_ns is not None:
            stages[ROUTER_FINISH] = now_ns - self._answered_ns
        rest = now_ns - self._started_ns - sum(stages.values())
        return {**stages, UNATTRIBUTED: max(0, rest)}
