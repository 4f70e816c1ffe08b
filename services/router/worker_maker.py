"""Makes the router's view of a worker process; what all workers of a role share lives here."""

from dataclasses import dataclass

import grpc

from services.router.breaker import CircuitBreaker
from services.router.held_blocks import HeldBlocks
from services.router.speed import MeasuredLine, WorkerSpeed
from services.router.workers import Role, Worker, WorkerInfo

# First guesses; a few requests outweigh them.
_PREFILL_BASE_S = 0.005
_PREFILL_TOKEN_S = 0.0001
_PREFILL_TYPICAL = 1000.0
_DECODE_STEP_S = 0.02
_DECODE_STEP_PER_REQUEST_S = 0.001
_DECODE_TYPICAL = 16.0
_ENCODE_S = 0.02
_TRANSFER_BASE_S = 0.002
_TRANSFER_TOKEN_S = 0.000002
_ENCODE_TYPICAL = 4.0


@dataclass(frozen=True)
class CacheView:
    """How the router follows prefix caches.

    Args:
        events: Whether workers are asked what they hold.
        blocks: Most blocks remembered per worker.
        bridge_s: How long a sent prompt counts as cached before the worker must have said so.
        assumed_s: The same where the worker tells nothing.
    """

    events: bool
    blocks: int
    bridge_s: float
    assumed_s: float


@dataclass(frozen=True)
class BreakerBounds:
    """Of each worker's circuit breaker: faults in a row that open it, seconds between probes."""

    faults: int
    open_s: float


class WorkerMaker:
    """Gives each worker its view of caches and its share in what all have measured."""

    def __init__(self, view: CacheView, bounds: BreakerBounds) -> None:
        self._view = view
        self._bounds = bounds
        self._lines = {
            Role.PREFILL: MeasuredLine(_PREFILL_BASE_S, _PREFILL_TOKEN_S, _PREFILL_TYPICAL),
            Role.DECODE: MeasuredLine(_DECODE_STEP_S, _DECODE_STEP_PER_REQUEST_S, _DECODE_TYPICAL),
            Role.ENCODER: MeasuredLine(_ENCODE_S, _ENCODE_S, _ENCODE_TYPICAL),
        }

        self._local_line = MeasuredLine(_PREFILL_BASE_S, _PREFILL_TOKEN_S, _PREFILL_TYPICAL)
        #: Time from the first token to the start of decode, by tokens whose KV is moved.
        self.transfer_line = MeasuredLine(_TRANSFER_BASE_S, _TRANSFER_TOKEN_S, _PREFILL_TYPICAL)

    @property
    def follows_caches(self) -> bool:
        """Whether workers are asked what they hold."""
        return self._view.events

    def worker(
        self, role: Role, address: str, info: WorkerInfo, channel: grpc.aio.Channel
    ) -> Worker:
        """A process that has just been reached."""
        view = self._view
        return Worker(
            role,
            address,
            info,
            channel,
            HeldBlocks(view.blocks, view.bridge_s, view.assumed_s),
            CircuitBreaker(f"{role.value} {address}", self._bounds.faults, self._bounds.open_s),
            WorkerSpeed(self._lines[role]),
            WorkerSpeed(self._local_line),
        )
