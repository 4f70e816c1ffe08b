"""Which workers a request can go to now, by the roles that it needs."""

import functools
from collections.abc import Callable, Set
from typing import Literal

from epd.errors import UnavailableError
from services.router.attempt import Work
from services.router.pick import closed, without
from services.router.registry import WorkerRegistry
from services.router.workers import Role, Worker

#: ``always``: prefill and decode apart; ``null``: unified workers alone; ``auto``: what probably
#: costs less, where there are workers for both.
DisaggregationMode = Literal["auto", "always", "null"]


class Routes:
    """Candidates for requests. An attempt prefers those that have not failed its request.

    Args:
        registry: The workers.
        mode: Whether prefill and decode run on different workers.
        patience_s: How long an attempt waits for a worker where there is none: one that restarts
            is back in a moment.
    """

    def __init__(
        self, registry: WorkerRegistry, mode: DisaggregationMode, patience_s: float
    ) -> None:
        self._registry = registry
        self._mode = mode
        self._patience_s = patience_s

    @property
    def disaggregates(self) -> bool:
        """Whether prefill and decode run apart now, if only for some requests."""
        if self._mode != "auto":
            return self._mode == "always"
        if self._registry.available(Role.PREFILL) or self._unified():
            return bool(self._registry.available(Role.PREFILL))
        return self._registry.expects(Role.PREFILL)  # whoever is away will be back

    @property
    def has_both_ways(self) -> bool:
        """Whether a text can be prefilled apart as well as on a unified worker."""
        if self._mode != "auto":
            return False
        return bool(self._registry.available(Role.PREFILL)) and bool(self._unified())

    def complete(self) -> bool:
        """Whether the workers that are there suffice for any request; for texts, where the settings
        name no encoder.
        """
        if not self.disaggregates:
            return bool(self._unified())
        workers = [self._registry.available(role) for role in (Role.PREFILL, Role.DECODE)]
        encodes = self._registry.expects(Role.ENCODER)
        if encodes and all(workers) and self._registry.model().accepts_images:
            workers.append(self._registry.available(Role.ENCODER))
        return all(workers)

    def has_alternatives(self, role: Role, avoid: Set[str]) -> bool:
        """Whether a request that failed at a worker of this role can go where it has not been."""
        roles = [Role.ENCODER] if role is Role.ENCODER else [Role.PREFILL, Role.DECODE]
        workers = [worker for found in roles for worker in self._registry.available(found)]
        return any(worker.info.instance_id not in avoid for worker in workers)

    def prompt_workers(self) -> list[Worker]:
        """Those that compute prompts: prefill workers, or unified ones where there is no other."""
        return self._registry.available(Role.PREFILL) if self.disaggregates else self._unified()

    async def encoders(self, work: Work) -> list[Worker]:
        """Those that read images as they were hashed: the fleet may have changed since then."""

        def fitting() -> list[Worker]:
            return [
                encoder
                for encoder in self._registry.available(Role.ENCODER)
                if encoder.info.processor_digest == work.prompt.processor_digest
            ]

        await self._come(fitting, work)
        return _preferred(fitting(), work, "encoder")

    async def unified_soon(self, work: Work) -> list[Worker]:
        """As :meth:`unified`, once there are some."""
        await self._come(self._unified, work)
        return self.unified(work)

    def unified(self, work: Work) -> list[Worker]:
        """Decode workers that prefill too."""
        return _preferred(self._unified(), work, "unified")

    async def pair_comes(self, work: Work) -> None:
        """Waits until there are workers of both roles, or patience is over."""
        for role in (Role.PREFILL, Role.DECODE):
            await self._come(functools.partial(self._registry.available, role), work)

    def pair(self, work: Work) -> tuple[list[Worker], list[Worker]]:
        """Prefill workers and decode workers."""
        prefills = _preferred(self._registry.available(Role.PREFILL), work, "prefill")
        decodes = _preferred(self._registry.available(Role.DECODE), work, "decode")
        # Prefill workers need not be paired with unified ones.
        return prefills, [worker for worker in decodes if not worker.info.unified] or decodes

    async def _come(self, workers: Callable[[], list[Worker]], work: Work) -> None:
        patience_s = min(self._patience_s, work.deadline.remaining_s())
        await self._registry.wait_until(lambda: bool(workers()), patience_s)

    def _unified(self) -> list[Worker]:
        return [worker for worker in self._registry.available(Role.DECODE) if worker.info.unified]


def _preferred(workers: list[Worker], work: Work, kind: str) -> list[Worker]:
    """Raises UnavailableError when there are none."""
    if not workers:
        raise UnavailableError(
            f"no {kind} worker takes requests", reason=f"NO_{kind.upper()}_WORKER"
        )
    return list(closed(without(workers, frozenset(work.avoid))))
