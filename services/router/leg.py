"""One call to one worker on behalf of a request, and who is to blame when it fails."""

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

import grpc

from epd.cleanup import cancel_and_wait
from epd.errors import EpdError, UnavailableError
from epd.rpc.status import error_from_rpc
from services.router.workers import Worker

WORKER_LOST = "WORKER_LOST"

T = TypeVar("T")


class LegFailedError(Exception):
    """A leg ended with ``error``; ``worker`` is the one it ran on."""

    def __init__(self, worker: Worker, error: EpdError) -> None:
        super().__init__(f"{worker.role.value} {worker.address}: {error.code} {error.message}")
        self.worker = worker
        self.error = error


async def run_leg(worker: Worker, call: Coroutine[Any, Any, T]) -> T:
    """Runs a call until it ends or the worker is taken for gone: a hung one never ends by itself.

    Raises:
        LegFailedError: the call failed, or the worker is gone.
    """
    leg = asyncio.ensure_future(call)
    gone = asyncio.ensure_future(worker.gone.wait())
    try:
        await asyncio.wait({leg, gone}, return_when=asyncio.FIRST_COMPLETED)
        # A channel that is closed under a call cancels it: that is a loss too, not a cancel.
        if leg.done() and not leg.cancelled():
            result = leg.result()
            worker.breaker.succeeded()
            return result
        raise UnavailableError(
            f"{worker.role.value} worker {worker.address} was lost", reason=WORKER_LOST
        )
    except grpc.aio.AioRpcError as raised:
        error = error_from_rpc(raised)
        worker.breaker.failed(error)
        raise LegFailedError(worker, error) from raised
    except grpc.aio.UsageError as raised:
        # It has left the discovery set: its channel lets calls end, and takes no new ones.
        left = UnavailableError(
            f"{worker.role.value} worker {worker.address} has left the fleet", reason=WORKER_LOST
        )
        raise LegFailedError(worker, left) from raised
    except EpdError as error:
        worker.breaker.failed(error)
        raise LegFailedError(worker, error) from error
    finally:
        await cancel_and_wait(leg, gone)
