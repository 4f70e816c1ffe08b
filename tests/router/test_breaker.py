"""Workers that fail in a row get probes only, and retries have a common bound."""

import asyncio
from pathlib import Path

import grpc
import pytest

from epd.errors import (
    DeadlineExceededError,
    EpdError,
    InternalError,
    InvalidRequestError,
    NotFoundError,
    RequestCancelledError,
    ResourceExhaustedError,
    TransferFailedError,
    UnavailableError,
)
from services.router.breaker import CircuitBreaker
from services.router.retry_budget import RetryBudget
from tests.router.conftest import Fleet
from tests.router.fake_workers import FakePrefill
from tests.router.harness import failure, request, router, running
from tests.router.test_prefix_knowledge import Clock
from tests.support.answer import collect

FAULT = UnavailableError("broken")


def opened(clock: Clock) -> CircuitBreaker:
    breaker = CircuitBreaker("w", faults=3, open_s=2.0, clock=clock)
    for _ in range(3):
        assert breaker.allows
        breaker.begin()
        breaker.failed(FAULT)
    assert not breaker.allows
    return breaker


@pytest.mark.parametrize(
    "error",
    [
        InvalidRequestError("bad", field="x"),
        NotFoundError("gone"),
        ResourceExhaustedError("full"),
        DeadlineExceededError("late"),
        RequestCancelledError("left"),
    ],
)
def test_what_is_not_the_servers_fault_never_opens_it(error: EpdError) -> None:
    breaker = CircuitBreaker("w", faults=3, open_s=2.0)
    for _ in range(10):
        breaker.failed(error)
    assert not breaker.is_open


def test_a_success_between_faults_keeps_it_closed() -> None:
    breaker = CircuitBreaker("w", faults=3, open_s=2.0)
    for _ in range(5):
        breaker.failed(InternalError("bug"))
        breaker.failed(TransferFailedError("layer 1"))
        breaker.succeeded()
    assert not breaker.is_open


def test_one_probe_at_a_time_and_its_success_closes_it() -> None:
    clock = Clock()
    breaker = opened(clock)
    clock.now += 2.0
    assert breaker.allows
    breaker.begin()
    assert not breaker.allows, "a second probe went with the first"
    breaker.failed(FAULT)
    clock.now += 1.9
    assert not breaker.allows
    clock.now += 0.2
    breaker.begin()
    breaker.succeeded()
    assert breaker.allows
    breaker.begin()
    assert breaker.allows


def test_a_probe_that_never_ends_does_not_block_the_next() -> None:
    clock = Clock()
    breaker = opened(clock)
    clock.now += 2.0
    breaker.begin()
    clock.now += 2.0
    assert breaker.allows


def test_retries_are_bounded_by_a_share_of_requests() -> None:
    clock = Clock()
    budget = RetryBudget(burst=5, share=0.2, per_s=1.0, clock=clock)
    assert [budget.take() for _ in range(7)] == [True] * 5 + [False] * 2
    for _ in range(11):
        budget.request()
    assert [budget.take() for _ in range(3)] == [True, True, False]
    clock.now += 1.0
    assert budget.take()


async def test_a_worker_that_fails_everything_gets_one_request_per_probe_time(
    model: Path, fleet: Fleet
) -> None:
    broken = FakePrefill(fleet.fabric)
    broken.failures = [UnavailableError("broken")] * 1000
    workers = [*fleet.workers, broken]
    settings = {"breaker_faults": "3", "breaker_open_s": "600"}
    slots = asyncio.Semaphore(6)  # so many may be on their way there before the first has failed
    async with running(*workers), router(model, workers, **settings) as served:

        async def ask() -> None:
            async with slots:
                await collect(served.stub.Generate(request(max_tokens=2)))

        async with asyncio.TaskGroup() as group:
            for _ in range(60):
                group.create_task(ask())
    assert broken.calls["Prefill"] < 15
    assert fleet.prefill.calls["Prefill"] == 60


async def test_a_repaired_worker_is_used_again(model: Path, fleet: Fleet) -> None:
    other = FakePrefill(fleet.fabric)
    other.failures = [UnavailableError("broken")] * 3
    workers = [*fleet.workers, other]
    settings = {"breaker_faults": "3", "breaker_open_s": "0.2"}
    async with running(*workers), router(model, workers, **settings) as served:
        for _ in range(500):
            await collect(served.stub.Generate(request(max_tokens=2)))
            if other.calls["Prefill"] >= 10:
                break
    assert other.calls["Prefill"] >= 10


async def test_a_lone_worker_is_asked_whatever_it_did(model: Path, fleet: Fleet) -> None:
    fleet.prefill.failures = [UnavailableError("broken")] * 6
    settings = {"breaker_faults": "3", "breaker_open_s": "600"}
    async with running(*fleet.workers), router(model, fleet.workers, **settings) as served:
        for _ in range(2):
            await failure(served.stub.Generate(request()))
        assert len((await collect(served.stub.Generate(request()))).token_ids) == 8


async def test_without_budget_the_first_failure_is_told(model: Path, fleet: Fleet) -> None:
    fleet.prefill.failures = [UnavailableError("broken")] * 3
    settings = {"retry_burst": "0", "retry_share": "0"}
    async with running(*fleet.workers), router(model, fleet.workers, **settings) as served:
        error = await failure(served.stub.Generate(request()))
    assert error.code() is grpc.StatusCode.UNAVAILABLE
    assert fleet.prefill.calls["Prefill"] == 1
