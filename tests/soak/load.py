"""Clients that never stop asking, and what became of each request."""

import asyncio
import random
from collections import Counter
from dataclasses import dataclass, field

import grpc

from epd.errors import (
    DataLossError,
    NotFoundError,
    ResourceExhaustedError,
    RetryableError,
    TransferFailedError,
    UnavailableError,
)
from epd.rpc.status import error_from_rpc
from epd.v1 import common_pb2, router_pb2_grpc
from tests.support.ask import generate_request
from tests.support.reference import Question

#: What a client may see of a broken fleet.
HONEST = (
    UnavailableError,
    TransferFailedError,
    DataLossError,
    ResourceExhaustedError,
    NotFoundError,
)
#: Longer than anything may take: whoever runs into it has been forgotten.
TIMEOUT_S = 60.0


@dataclass(frozen=True)
class Case:
    """A request and its undisturbed answer."""

    question: Question
    sampling: common_pb2.SamplingParams
    tokens: tuple[int, ...]


@dataclass
class Outcomes:
    """What has become of the requests; ``wrong`` must stay empty."""

    requests: int = 0
    finished: int = 0
    cancelled: int = 0
    errors: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)


class Load:
    """Asks random cases at a steady concurrency and checks every token that comes back.

    Args:
        channel: To the router.
        cases: What may be asked.
        source: Draws cases, and who goes away early.
        cancel_share: How many clients go away before their answer is complete.
    """

    def __init__(
        self,
        channel: grpc.aio.Channel,
        cases: list[Case],
        source: random.Random,
        cancel_share: float = 0.1,
    ) -> None:
        self.outcomes = Outcomes()
        self._channel = channel
        self._cases = cases
        self._source = source
        self._cancel_share = cancel_share

    async def run(self, clients: int, stop: asyncio.Event) -> None:
        """Until ``stop`` is set and every open request has ended."""

        async def client() -> None:
            while not stop.is_set():
                case = self._source.choice(self._cases)
                gone = self._source.random() < self._cancel_share
                await self._one(case, self._source.uniform(0, 1.0) if gone else None)

        async with asyncio.TaskGroup() as group:
            for _ in range(clients):
                group.create_task(client())

    async def _one(self, case: Case, patience_s: float | None) -> None:
        outcomes = self.outcomes
        outcomes.requests += 1
        arrived: list[int] = []
        try:
            async with asyncio.timeout(patience_s):
                await self._ask(case, arrived)
        except TimeoutError:
            outcomes.cancelled += 1
        except grpc.aio.AioRpcError as refusal:
            error = error_from_rpc(refusal)
            outcomes.errors[f"{error.code}/{error.reason}"] += 1
            if not isinstance(error, HONEST):
                outcomes.wrong.append(f"{error!r} ({error.reason})")
            if isinstance(error, RetryableError):
                await asyncio.sleep(min(error.retry_after_s, 1.0))  # as a client would
        else:
            outcomes.finished += 1
            if len(arrived) != len(case.tokens):
                outcomes.wrong.append(f"{len(arrived)} of {len(case.tokens)} tokens")
        if tuple(arrived) != case.tokens[: len(arrived)]:
            outcomes.wrong.append(f"{arrived} instead of {case.tokens}")

    async def _ask(self, case: Case, arrived: list[int]) -> None:
        request = generate_request(case.question, case.sampling)
        stub = router_pb2_grpc.RouterServiceStub(self._channel)
        call = stub.Generate(request, timeout=TIMEOUT_S)
        try:
            async for response in call:
                arrived += response.delta.token_ids
        finally:
            call.cancel()
