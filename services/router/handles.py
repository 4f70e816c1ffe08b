"""Embedding handles of one request: kept alive while the router owns them, always given back."""

import asyncio
import logging
import time

import grpc

from epd.cleanup import CleanupTasks
from epd.errors import NotFoundError
from epd.rpc.request_context import new_id
from epd.v1 import encoder_pb2
from services.router.leg import run_leg
from services.router.placeholders import ImagePlan
from services.router.workers import Worker

_log = logging.getLogger(__name__)
#: An encoder that grants absurdly short leases is not flooded with renewals for it: prefill refuses
#: such a handle. One without a lease (0 ms) is not renewed at all.
_MIN_RENEW_S = 0.01


class HandleSet:
    """The handles of a request's images, by the encoder that granted them.

    The router owns a handle from ``Planned`` until the prefill worker has read the embedding. A
    prefill call that may have begun to read is told apart: then the memory must not be reused
    before that worker has confirmed, so the handle is given back as not settled.

    Args:
        cleanup: Runs what must happen also when the request's own task is cancelled.
        rpc_timeout_s: Bound of each Renew and Release.
    """

    def __init__(self, cleanup: CleanupTasks, rpc_timeout_s: float) -> None:
        self._cleanup = cleanup
        self._rpc_timeout_s = rpc_timeout_s
        #: Sent with every Encode call, so that handles can be given back whose news never got here.
        self.attempt_id = new_id()
        self._asked: set[Worker] = set()
        self._held: dict[Worker, list[str]] = {}
        self._granted = asyncio.Event()
        self._lease_s = float("inf")

    def ask(self, worker: Worker) -> None:
        """``worker`` is about to be asked for handles."""
        self._asked.add(worker)

    def add(self, worker: Worker, plan: ImagePlan) -> None:
        """Takes a handle that ``worker`` has granted."""
        self._held.setdefault(worker, []).append(plan.handle.handle_id)
        if plan.handle.lease_ms:
            self._lease_s = min(self._lease_s, plan.handle.lease_ms / 1000)
            self._granted.set()

    def forget(self) -> None:
        """The prefill worker has read everything and gives the handles back itself."""
        self._held.clear()

    def release(self, *, settled: bool) -> None:
        """Gives all handles back, in the background; those given back before do no harm.

        Settled ones may include handles whose ``Planned`` was never read: a call that is cancelled
        here may have ended well over there.
        """
        held, self._held = self._held, {}
        for worker in held.keys() | (self._asked if settled else set()):
            request = encoder_pb2.ReleaseRequest(
                handle_ids=held.get(worker, ()),
                settled=settled,
                attempt_id=self.attempt_id if settled else "",
            )
            self._cleanup.spawn(self._release(worker, request))

    async def keep_alive(self) -> None:
        """Renews the leases until cancelled.

        Raises:
            LegFailedError: an encoder does not know a handle any more, or does not answer.
        """
        await self._granted.wait()
        renewed_s = time.monotonic()
        while True:
            # A handle that comes later may have a shorter lease, so this looks again every second.
            period_s = max(self._lease_s / 3, _MIN_RENEW_S)
            await asyncio.sleep(min(period_s, 1.0))
            if time.monotonic() - renewed_s < period_s:
                continue
            renewed_s = time.monotonic()
            for worker, handle_ids in list(self._held.items()):
                await run_leg(worker, self._renew(worker, handle_ids))

    async def _renew(self, worker: Worker, handle_ids: list[str]) -> None:
        response = await worker.encoder.Renew(
            encoder_pb2.EncoderServiceRenewRequest(handle_ids=handle_ids),
            timeout=self._rpc_timeout_s,
        )
        if response.unknown_handle_ids:
            raise NotFoundError(f"encoder {worker.address} has dropped an embedding")

    async def _release(self, worker: Worker, request: encoder_pb2.ReleaseRequest) -> None:
        try:
            await worker.encoder.Release(request, timeout=self._rpc_timeout_s)
        except grpc.aio.AioRpcError as error:
            # The encoder is gone, or its leases will run out.
            _log.warning("release at encoder %s failed: %s", worker.address, error.code().name)
        except grpc.aio.UsageError:  # its channel is being closed
            _log.warning("encoder %s has left the fleet: its leases will run out", worker.address)
