"""WorkerService: what every worker tells about itself."""

import asyncio
import time
from collections.abc import AsyncIterator, Callable

from epd.errors import UnsupportedFeatureError
from epd.rpc.aliases import ServicerContext
from epd.v1 import worker_pb2, worker_pb2_grpc

#: Reports of one stream are at least this far apart, so that a busy engine cannot flood it.
MIN_REPORT_INTERVAL_S = 0.02
#: The load is looked at so often for changes that nobody announces. What a router does not know of
#: the others' requests for longer, it would send after them to the worker that was idle before.
LOOK_INTERVAL_S = 0.05


class WorkerServicer(worker_pb2_grpc.WorkerServiceServicer):
    """Answers from functions that the worker passes in; they run on the event loop and are quick.

    Args:
        info: The answer of GetInfo.
        load: The load now; ``sequence`` is filled in here.
        heartbeat_s: Longest time between two reports of a stream.
        kv_events: Opens a stream of prefix-cache changes that starts with all that is stored; None
            when the worker has no prefix cache.
    """

    def __init__(
        self,
        info: Callable[[], worker_pb2.GetInfoResponse],
        load: Callable[[], worker_pb2.WatchLoadResponse],
        *,
        heartbeat_s: float,
        kv_events: Callable[[], AsyncIterator[worker_pb2.WatchKvEventsResponse]] | None = None,
    ) -> None:
        self._info = info
        self._load = load
        self._heartbeat_s = heartbeat_s
        self._kv_events = kv_events
        self._watchers: set[asyncio.Event] = set()

    def load_changed(self) -> None:
        """Sends a report soon, ahead of the heartbeat. Called on the event loop."""
        for watcher in self._watchers:
            watcher.set()

    async def GetInfo(
        self, request: worker_pb2.GetInfoRequest, context: ServicerContext
    ) -> worker_pb2.GetInfoResponse:
        """See the proto."""
        return self._info()

    async def WatchLoad(
        self, request: worker_pb2.WatchLoadRequest, context: ServicerContext
    ) -> AsyncIterator[worker_pb2.WatchLoadResponse]:
        """See the proto; ends only with the call."""
        changed = asyncio.Event()
        self._watchers.add(changed)
        sequence = 0
        try:
            while True:
                changed.clear()
                report = self._load()
                sequence += 1
                report.sequence = sequence
                yield report
                due_s = time.monotonic() + self._heartbeat_s
                await asyncio.sleep(min(MIN_REPORT_INTERVAL_S, self._heartbeat_s))
                await self._until_news(changed, report, due_s)
        finally:
            self._watchers.discard(changed)

    async def _until_news(
        self, changed: asyncio.Event, told: worker_pb2.WatchLoadResponse, due_s: float
    ) -> None:
        """Returns once the work there is no more what was told, at the latest at ``due_s``."""
        while (left_s := due_s - time.monotonic()) > 0:
            try:
                async with asyncio.timeout(min(LOOK_INTERVAL_S, left_s)):
                    await changed.wait()
                    return
            except TimeoutError:
                if _work(self._load()) != _work(told):
                    return

    async def WatchKvEvents(
        self, request: worker_pb2.WatchKvEventsRequest, context: ServicerContext
    ) -> AsyncIterator[worker_pb2.WatchKvEventsResponse]:
        """See the proto."""
        if self._kv_events is None:
            raise UnsupportedFeatureError("this worker has no prefix cache")
        async for event in self._kv_events():
            yield event


def _work(load: worker_pb2.WatchLoadResponse) -> tuple[int, int, int, bool]:
    """What routers choose by. Free blocks change with every step: they go with the rest."""
    requests = (load.running_requests, load.waiting_requests)
    return (*requests, load.waiting_tokens, load.draining)
