"""Follows what enters and leaves one worker's prefix cache."""

import asyncio
import logging

import grpc

from epd.v1 import worker_pb2, worker_pb2_grpc
from services.router.held_blocks import EventGapError
from services.router.workers import Worker

_log = logging.getLogger(__name__)


async def follow_prefix_cache(
    worker: Worker, channel: grpc.aio.Channel, *, backoff_s: float, max_backoff_s: float
) -> None:
    """Keeps ``worker.held`` up to date until cancelled, or until the worker says that it cannot.

    A stream that breaks or skips a change is opened anew: it begins with a full list. Meanwhile,
    and for a worker that tells nothing, the router goes by what it has sent there.
    """
    wait_s = backoff_s
    while True:
        call = worker_pb2_grpc.WorkerServiceStub(channel).WatchKvEvents(
            worker_pb2.WatchKvEventsRequest()
        )
        try:
            async for event in call:
                worker.held.apply(
                    event.sequence,
                    event.stored_hashes,
                    event.removed_hashes,
                    cleared=event.cleared,
                )
                wait_s = backoff_s
        except EventGapError as gap:
            _log.warning("prefix cache of %s: %s, asking for a full list", worker.address, gap)
        except grpc.aio.AioRpcError as error:
            if error.code() is grpc.StatusCode.UNIMPLEMENTED:
                _log.info("%s tells nothing of its prefix cache", worker.address)
                return
        finally:
            call.cancel()
            worker.held.lost()
        await asyncio.sleep(wait_s)
        wait_s = min(wait_s * 2, max_backoff_s)
