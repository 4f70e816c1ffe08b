"""More requests than the workers can serve in time, and who gets served."""

import asyncio
from pathlib import Path
from typing import Any

import grpc
import openai
import pytest

from epd.config import ConfigError
from epd.errors import ResourceExhaustedError, UnauthenticatedError
from epd.rpc.status import error_from_rpc
from epd.telemetry.prometheus import scrape
from epd.v1 import router_pb2
from services.router.api_keys import ApiKeys
from services.router.overload import check_deadline
from tests.router.conftest import Fleet
from tests.router.harness import RunningRouter, eventually, failure, request, router, running
from tests.support.answer import collect
from tests.support.openai_client import openai_client


async def test_a_request_that_would_be_late_is_refused_before_it_is_encoded(
    model: Path, fleet: Fleet
) -> None:
    fleet.prefill.token_s = 0.02  # about 30 tokens each, one after the other
    async with running(*fleet.workers), router(model, fleet.workers) as served:
        for _ in range(5):
            await collect(served.stub.Generate(request("measured", max_tokens=2)))
        encoded = fleet.encoder.calls["Encode"]
        async with fleet.prefill.engine:  # nothing gets on until the refusal
            queue = [
                asyncio.create_task(collect(served.stub.Generate(request(f"{number} queued"))))
                for number in range(60)
            ]
            await eventually(lambda: fleet.prefill.open_calls == 60, within_s=60)
            error = await failure(served.stub.Generate(request("late", [b"image"]), timeout=12.0))
            fleet.prefill.token_s = 1e-6
        refusal = error_from_rpc(error)
        assert error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert refusal.reason == "DEADLINE_UNREACHABLE"
        assert getattr(refusal, "retry_after_s", 0) > 0
        assert fleet.encoder.calls["Encode"] == encoded
        await asyncio.gather(*queue)
        answer = await collect(served.stub.Generate(request("late", [b"image"]), timeout=60.0))
        assert len(answer.token_ids) == 8


def test_a_request_that_finds_nothing_ahead_is_let_in_whatever_is_predicted() -> None:
    check_deadline(100.0, 1.0, queued=False)
    check_deadline(0.9, 1.0, queued=True)
    with pytest.raises(ResourceExhaustedError) as refused:
        check_deadline(100.0, 1.0, queued=True)
    assert refused.value.retry_after_s == 60.0


async def test_overload_clears_after_a_stall_however_wrong_it_made_the_prediction(
    model: Path, fleet: Fleet
) -> None:
    fleet.prefill.token_s = 0.02
    async with running(*fleet.workers), router(model, fleet.workers) as served:
        await asyncio.gather(
            *(collect(served.stub.Generate(request(f"{n} slow"))) for n in range(4))
        )
        fleet.prefill.token_s = 0.0001
        for number in range(10):
            message = request(f"{number} quick", max_tokens=2)
            await collect(served.stub.Generate(message, timeout=20.0))


async def test_requests_beyond_the_workers_capacity_wait_and_high_priority_goes_first(
    model: Path, fleet: Fleet
) -> None:
    fleet.prefill.token_s = 1e-6
    settings = {"prefill_ahead": "1", "metrics_port": "0"}
    async with running(*fleet.workers), router(model, fleet.workers, **settings) as served:

        async def ask(name: str, priority: int) -> None:
            message = request(priority=priority, max_tokens=1, request_id=name)
            await collect(served.stub.Generate(message))

        async with asyncio.TaskGroup() as group, fleet.prefill.engine:
            group.create_task(ask("first", 0))
            await eventually(lambda: fleet.prefill.open_calls == 1)
            for count, (name, priority) in enumerate([("low", 2), ("normal", 0), ("high", 1)]):
                group.create_task(ask(name, priority))
                await _until_waiting(served, count + 1)
    order = [sent.request_id for sent in fleet.prefill.requests]
    assert order == ["first", "high", "normal", "low"]


async def _until_waiting(served: RunningRouter, count: int) -> None:
    async with asyncio.timeout(60):
        while True:
            found = await asyncio.to_thread(scrape, served.telemetry.metrics_address)
            if found.total("epd_request_waiting") == count:
                return


async def test_an_unknown_priority_is_refused_by_name(model: Path, fleet: Fleet) -> None:
    async with running(*fleet.workers), router(model, fleet.workers) as served:
        error = error_from_rpc(await failure(served.stub.Generate(request(priority=9))))
    assert getattr(error, "field", "") == "priority"


async def test_only_callers_with_a_key_are_served(
    model: Path, fleet: Fleet, tmp_path: Path
) -> None:
    file = tmp_path / "keys"
    file.write_text("# ours\nbob:sesame-bob\n\n")
    settings = {"api_keys": "alice:sesame", "api_keys_file": str(file)}
    async with running(*fleet.workers), router(model, fleet.workers, **settings) as served:
        for metadata in [
            (("authorization", "Bearer sesame"),),
            (("x-api-key", "sesame-bob"),),
        ]:
            await collect(served.stub.Generate(request(), metadata=metadata))
        for wrong in [(), (("authorization", "Bearer sesam"),), (("x-api-key", ""),)]:
            error = await failure(served.stub.Generate(request(), metadata=wrong))
            assert error.code() is grpc.StatusCode.UNAUTHENTICATED
            with pytest.raises(grpc.aio.AioRpcError) as raised:
                await served.stub.GetModel(router_pb2.GetModelRequest(), metadata=wrong)
            assert raised.value.code() is grpc.StatusCode.UNAUTHENTICATED
    assert fleet.prefill.calls["Prefill"] == 2


async def test_ids_of_different_clients_never_meet(model: Path, fleet: Fleet) -> None:
    fleet.prefill.token_s = 1e-6
    settings = {"api_keys": "alice:one,bob:two"}
    async with running(*fleet.workers), router(model, fleet.workers, **settings) as served:

        def ask(key: str) -> "grpc.aio.UnaryStreamCall[Any, Any]":
            return served.stub.Generate(
                request(request_id="same"), metadata=(("x-api-key", key),), timeout=60
            )

        async with asyncio.TaskGroup() as group, fleet.prefill.engine:
            for key in ("one", "two"):
                group.create_task(collect(ask(key)))
            await eventually(lambda: fleet.prefill.open_calls == 2)
            error = await failure(ask("one"))
    assert error.code() is grpc.StatusCode.ALREADY_EXISTS


def test_names_of_keys_and_what_is_no_key(tmp_path: Path) -> None:
    keys = ApiKeys(["alice:a", "b"])
    assert keys.client([("x-api-key", "a")]) == "alice"
    assert keys.client([("authorization", "Bearer b")]) == "key-1"
    with pytest.raises(UnauthenticatedError):
        keys.client([("x-api-key", "alice:a")])
    with pytest.raises(ConfigError):
        ApiKeys(["name:"])
    with pytest.raises(ConfigError):
        ApiKeys.load([], tmp_path / "absent")
    assert ApiKeys().client([]) == ""


async def test_http_callers_show_the_same_keys(model: Path, fleet: Fleet) -> None:
    settings = {"api_keys": "alice:sesame", "model_name": "m"}
    async with running(*fleet.workers), router(model, fleet.workers, **settings) as served:
        for key, allowed in [("sesame", True), ("wrong", False)]:
            async with openai_client(served.http, key) as client:
                asked = client.completions.create(model="m", prompt="hello", max_tokens=2)
                if allowed:
                    assert (await asked).choices[0].text
                else:
                    with pytest.raises(openai.AuthenticationError):
                        await asked
