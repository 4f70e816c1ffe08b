"""Follows whatever process answers at one address: its health, its identity, its load."""

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from epd.cleanup import cancel_and_wait, raise_if_cancelled
from epd.errors import EpdError, UnavailableError
from epd.rpc.status import error_from_rpc, root_error
from epd.v1 import worker_pb2, worker_pb2_grpc
from services.router.kv_watch import follow_prefix_cache
from services.router.worker_info import info_from_proto, report_from_proto
from services.router.worker_maker import WorkerMaker
from services.router.workers import Role, Worker, WorkerState

_log = logging.getLogger(__name__)
_END_OF_STREAM = grpc.aio.EOF  # type: ignore[attr-defined]
_SILENCE_SLICES = 4
_NOT_REACHED = "not reached yet"
_SERVING = health_pb2.HealthCheckResponse.SERVING


@dataclass(frozen=True)
class WatchTimings:
    """Bounds of a watch, in seconds.

    Args:
        silence_s: A process that tells nothing for so long is gone.
        backoff_s: First wait before trying to reach a worker again; doubles.
        max_backoff_s: Longest such wait.
        leave_grace_s: How long running calls may go on at a worker that left the discovery set.
    """

    silence_s: float
    backoff_s: float
    max_backoff_s: float
    leave_grace_s: float


class WorkerWatch:
    """One address of the discovery set.

    A process whose streams break or fall silent is taken for gone, for good: what answers there
    next is another :class:`Worker`. One that reports NOT_SERVING or draining keeps its running
    requests and gets no new ones.

    Args:
        role: What the worker must be.
        address: Its gRPC endpoint.
        channel: The channel there; the owner closes it.
        timings: Bounds.
        maker: Makes the :class:`Worker` of a process.
        objection: Why a worker must not be used (another model, for one), or empty.
        changed: Called whenever ``worker`` or ``reason`` may have changed.
    """

    def __init__(
        self,
        role: Role,
        address: str,
        channel: grpc.aio.Channel,
        timings: WatchTimings,
        maker: WorkerMaker,
        objection: Callable[[Worker], str],
        changed: Callable[[], None],
    ) -> None:
        self._role = role
        self._address = address
        self._channel = channel
        self._timings = timings
        self._maker = maker
        self._objection = objection
        self._changed = changed
        self._worker: Worker | None = None
        self._unreached = _NOT_REACHED
        self._serving = asyncio.Event()
        self._draining = False

    @property
    def worker(self) -> Worker | None:
        """The process there now, whether or not it takes requests."""
        return self._worker

    @property
    def heard(self) -> bool:
        """Whether the process was met, or could not be: only the first contact is open else."""
        return self._worker is not None or self._unreached != _NOT_REACHED

    @property
    def able(self) -> bool:
        """Whether the process takes requests, as far as it is concerned."""
        return self._worker is not None and self._serving.is_set() and not self._draining

    @property
    def reason(self) -> str:
        """Why requests must not go there; empty when they may."""
        if self._worker is None:
            return self._unreached
        if not self._serving.is_set():
            return "reports NOT_SERVING"
        return "draining" if self._draining else self._objection(self._worker)

    @property
    def state(self) -> WorkerState:
        """A line for the list of workers."""
        worker = self._worker
        return WorkerState(
            role=self._role,
            address=self._address,
            instance_id=worker.info.instance_id if worker else "",
            in_flight=worker.account.in_flight if worker else 0,
            reason=self.reason,
        )

    async def run(self) -> None:
        """Watches until cancelled; running requests of the worker may go on after that."""
        backoff_s = self._timings.backoff_s
        while True:
            try:
                await self._session()
            except (grpc.aio.AioRpcError, EpdError, BaseExceptionGroup) as raised:
                error = root_error(raised)
                if not isinstance(error, grpc.aio.AioRpcError | EpdError):
                    raise
                raise_if_cancelled()
                self._unreached = _reason(error)
                self._changed()
            backoff_s = min(backoff_s * 2, self._timings.max_backoff_s)
            if self._worker is not None:
                backoff_s = self._timings.backoff_s
                self._drop(self._worker)
            await asyncio.sleep(backoff_s)

    async def _session(self) -> None:
        self._serving.clear()
        async with asyncio.TaskGroup() as group:
            group.create_task(self._watch_health())
            await self._serving.wait()
            self._worker = await self._greet()
            self._changed()
            if self._maker.follows_caches and self._worker.info.pairing is not None:
                group.create_task(
                    follow_prefix_cache(
                        self._worker,
                        self._channel,
                        backoff_s=self._timings.backoff_s,
                        max_backoff_s=self._timings.max_backoff_s,
                    )
                )
            await self._watch_load(self._worker)

    async def _watch_health(self) -> None:
        request = health_pb2.HealthCheckRequest(service=self._role.service_name)
        call = health_pb2_grpc.HealthStub(self._channel).Watch(request)
        # Only the first answer is due at once; later ones come when something changes.
        silence_s: float | None = self._timings.silence_s
        try:
            while (response := await _read(call, silence_s)) is not None:
                silence_s = None
                if response.status == _SERVING:
                    self._serving.set()
                else:
                    self._serving.clear()
                    self._unreached = "reports NOT_SERVING"
                self._changed()
        finally:
            call.cancel()
        raise UnavailableError("health watch ended")

    async def _greet(self) -> Worker:
        stub = worker_pb2_grpc.WorkerServiceStub(self._channel)
        response = await stub.GetInfo(worker_pb2.GetInfoRequest(), timeout=self._timings.silence_s)
        if response.role != self._role.wire:
            raise UnavailableError(f"is no {self._role.value} worker")
        info = info_from_proto(response)
        worker = self._maker.worker(self._role, self._address, info, self._channel)
        _log.info("%s %s is instance %s", self._role.value, self._address, response.instance_id)
        return worker

    async def _watch_load(self, worker: Worker) -> None:
        stub = worker_pb2_grpc.WorkerServiceStub(self._channel)
        call = stub.WatchLoad(worker_pb2.WatchLoadRequest())
        try:
            while (load := await _read(call, self._timings.silence_s)) is not None:
                if load.instance_id != worker.info.instance_id:
                    raise UnavailableError("another process has taken over the address")
                worker.account.report(report_from_proto(load))
                if load.draining != self._draining:
                    self._draining = load.draining
                    self._changed()
        finally:
            call.cancel()
        raise UnavailableError("load reports ended")

    def _drop(self, worker: Worker) -> None:
        _log.warning("%s %s lost: %s", self._role.value, self._address, self._unreached)
        worker.gone.set()
        self._worker = None
        self._draining = False
        self._changed()


async def _read(call: Any, silence_s: float | None) -> Any:
    """The next message of a stream, None at its end; UnavailableError when none comes in time.

    The wait is cut into slices: when this process itself was held up, one slice ends late and the
    messages that came meanwhile are found in the next. Only a peer's silence fills all of them.
    """
    reading = asyncio.ensure_future(call.read())
    try:
        for _ in range(_SILENCE_SLICES):
            slice_s = None if silence_s is None else silence_s / _SILENCE_SLICES
            # Waited for, not timed out: a cancelled read would cancel the whole call.
            await asyncio.wait({reading}, timeout=slice_s)
            if reading.done():
                message = reading.result()
                return None if message is _END_OF_STREAM else message
        raise UnavailableError(f"silent for {silence_s:g} s")
    finally:
        await cancel_and_wait(reading)


def _reason(error: grpc.aio.AioRpcError | EpdError) -> str:
    if isinstance(error, grpc.aio.AioRpcError):
        return f"{error.code().name}: {error_from_rpc(error).message}"
    return error.message
