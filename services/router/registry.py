"""All workers the router knows, by role, and the model they serve together."""

import asyncio
import logging
from collections.abc import Callable, Mapping, Sequence

from epd.errors import UnavailableError
from epd.rpc.channels import ChannelPool
from epd.rpc.discovery import Discovery
from services.router.image_processor import FleetProcessor
from services.router.worker_maker import WorkerMaker
from services.router.worker_watch import WatchTimings, WorkerWatch
from services.router.workers import Role, ServedModel, Worker, WorkerState

_log = logging.getLogger(__name__)


class WorkerRegistry:
    """Watches every address of the discovery sets.

    All workers of a fleet serve one model. Unless configured, that is the model of the first worker
    that is reached; once none of its workers is left, the next one decides again. All encoders read
    images alike, see :class:`FleetProcessor`.

    Args:
        discoveries: One set per role.
        channels: Per role, since encoders take larger messages.
        timings: Bounds of the watches.
        maker: Makes workers of the processes that are found.
        model_name: What clients call the model.
        model_digest: The only model to be used; empty takes what is found.
    """

    def __init__(
        self,
        discoveries: Mapping[Role, Discovery],
        channels: Mapping[Role, ChannelPool],
        timings: WatchTimings,
        maker: WorkerMaker,
        *,
        model_name: str,
        model_digest: str = "",
    ) -> None:
        self._discoveries = discoveries
        self._channels = channels
        self._timings = timings
        self._maker = maker
        self._configured_digest = model_digest
        self._digest = model_digest
        self._processor = FleetProcessor()
        #: Workers that are reached but not used, and why; for the log.
        self._refused: dict[str, str] = {}
        self._model_name = model_name
        self._watches: dict[tuple[Role, str], WorkerWatch] = {}
        self._changed = asyncio.Event()

    async def run(self) -> None:
        """Follows the discovery sets until cancelled."""
        async with asyncio.TaskGroup() as group:
            for role in self._discoveries:
                group.create_task(self._follow(role, group))

    def available(self, role: Role) -> list[Worker]:
        """Workers that take requests."""
        return [
            watch.worker
            for (found, _), watch in self._watches.items()
            if found is role and watch.worker is not None and not watch.reason
        ]

    def expects(self, role: Role) -> bool:
        """Whether workers of this role can come: the settings name some."""
        return role in self._discoveries and not self._discoveries[role].empty

    @property
    def maker(self) -> WorkerMaker:
        """What all workers of a role share."""
        return self._maker

    def states(self) -> list[WorkerState]:
        """All workers, by role and address."""
        ordered = sorted(self._watches.items(), key=lambda item: (item[0][0].name, item[0][1]))
        return [watch.state for _, watch in ordered]

    @property
    def model_digest(self) -> str:
        """Digest of the only model that is used now; empty before the first worker."""
        return self._digest

    @property
    def settled(self) -> bool:
        """Whether each worker was met or could not be reached: no first contact is open."""
        return all(watch.heard for watch in self._watches.values())

    async def model_soon(self, timeout_s: float) -> ServedModel:
        """The model that is served, once a worker takes requests.

        Raises:
            UnavailableError: none does in time.
        """
        await self.wait_until(lambda: any(self.available(role) for role in Role), timeout_s)
        return self.model()

    def model(self) -> ServedModel:
        """The model that is served.

        Raises:
            UnavailableError: no worker takes requests.
        """
        infos = [worker.info for role in Role for worker in self.available(role)]
        if not infos:
            raise UnavailableError("no worker takes requests", reason="NO_WORKER")
        image_limits = [info.max_images for info in infos if info.max_images]
        return ServedModel(
            name=self._model_name,
            digest=infos[0].model_digest,
            processor_digest=self._processor.digest,
            context_length=min(
                (info.context_length for info in infos if info.context_length), default=0
            ),
            accepts_images=any(info.accepts_images for info in infos),
            max_images=min(image_limits, default=0),
        )

    async def wait_until(self, condition: Callable[[], bool], timeout_s: float) -> bool:
        """Waits for workers to come; False when ``condition`` does not hold in time."""
        if condition():
            return True
        try:
            async with asyncio.timeout(timeout_s):
                while not condition():
                    self._changed.clear()
                    await self._changed.wait()
        except TimeoutError:
            return False
        return True

    async def _follow(self, role: Role, group: asyncio.TaskGroup) -> None:
        tasks: dict[str, asyncio.Task[None]] = {}
        async for member in self._discoveries[role].watch():
            address = member.address
            if member.joined:
                watch = WorkerWatch(
                    role,
                    address,
                    self._channels[role].get(address),
                    self._timings,
                    self._maker,
                    self._objection,
                    self._on_change,
                )
                self._watches[role, address] = watch
                tasks[address] = group.create_task(watch.run())
            else:
                # A worker that leaves the set may still be finishing requests; its channel is
                # closed with some grace so that they can.
                tasks.pop(address).cancel()
                del self._watches[role, address]
                group.create_task(self._channels[role].close(address, self._timings.leave_grace_s))
                self._on_change()

    def _on_change(self) -> None:
        infos = [watch.worker.info for watch in self._watches.values() if watch.worker is not None]
        if infos and not self._configured_digest:
            digests = [info.model_digest for info in infos]
            if self._digest not in digests:
                self._digest = digests[0]
                self._processor.forget()
        able = [watch.worker for watch in self._watches.values() if watch.able and watch.worker]
        self._processor.update([one for one in able if one.info.model_digest == self._digest])
        self._log_refused(able)
        self._changed.set()

    def _objection(self, worker: Worker) -> str:
        """Why a worker must not be used: it differs from the fleet in what must be the same."""
        if worker.info.model_digest != self._digest:
            return f"serves model {worker.info.model_digest}, the fleet serves {self._digest}"
        return self._processor.objection(worker)

    def _log_refused(self, able: Sequence[Worker]) -> None:
        refused = {one.info.instance_id: self._objection(one) for one in able}
        for worker in able:
            instance_id = worker.info.instance_id
            objection = refused[instance_id]
            if objection and objection != self._refused.get(instance_id):
                _log.warning(
                    "%s %s takes no requests: it %s", worker.role.value, worker.address, objection
                )
        self._refused = refused
