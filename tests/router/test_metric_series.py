"""What is measured of requests is bounded in its series and counts from their arrival."""

import asyncio
from pathlib import Path

from epd.telemetry.prometheus import scrape
from tests.router.conftest import Fleet
from tests.router.harness import all_leave, request, router, running
from tests.router.test_http_bounds import exchange
from tests.support.answer import collect


async def test_methods_that_clients_invent_are_one_series(model: Path, fleet: Fleet) -> None:
    async with (
        running(*fleet.workers),
        router(model, fleet.workers, metrics_port="0") as served,
    ):
        for number in range(5):
            head = f"INVENTED{number} /v1/completions HTTP/1.1\r\nhost: x\r\nconnection: close"
            assert (await exchange(served.http, f"{head}\r\n\r\n".encode()))[0] == 405
        found = await asyncio.to_thread(scrape, served.telemetry.metrics_address)
    name = "http_server_request_duration_seconds_count"
    methods = [labels["http_request_method"] for one, labels, _ in found.samples if one == name]
    assert methods == ["_OTHER"]
    assert found.total(name) == 5


async def test_the_wait_for_a_first_worker_is_part_of_a_requests_duration(
    model: Path, fleet: Fleet
) -> None:
    settings = {"metrics_port": "0", "worker_patience_s": "30"}
    async with running(*fleet.workers), router(model, fleet.workers, **settings) as served:
        await all_leave(served, fleet.workers)
        asked = asyncio.create_task(collect(served.stub.Generate(request(max_tokens=2))))
        await asyncio.sleep(0.5)
        for worker in fleet.workers:
            await worker.set_health(True)
        await asked
        found = await asyncio.to_thread(scrape, served.telemetry.metrics_address)
    first_token_s = found.total("gen_ai_server_time_to_first_token_seconds_sum")
    assert first_token_s > 0.4
    assert found.total("gen_ai_server_request_duration_seconds_sum") >= first_token_s
    assert found.total("gen_ai_server_time_per_output_token_seconds_sum") >= 0
