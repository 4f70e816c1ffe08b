"""HTTP requests wait for a worker that is just coming, as gRPC requests do."""

import asyncio
import json
from pathlib import Path

import pytest

from tests.router.conftest import Fleet
from tests.router.harness import all_leave, router, running
from tests.router.test_http_bounds import exchange, post


@pytest.mark.parametrize(("patience_s", "absent_s", "status"), [("30", 0.5, 200), ("0", 60.0, 503)])
async def test_a_request_that_meets_no_worker_waits_for_one_within_patience(
    model: Path, fleet: Fleet, patience_s: str, absent_s: float, status: int
) -> None:
    settings = {"model_name": "m", "worker_patience_s": patience_s}
    said = [{"role": "user", "content": "x"}]
    body = json.dumps({"model": "m", "max_tokens": 2, "messages": said}).encode()
    async with running(*fleet.workers), router(model, fleet.workers, **settings) as served:
        await all_leave(served, fleet.workers)
        asked = asyncio.create_task(exchange(served.http, post(body), timeout_s=60))
        await asyncio.wait({asked}, timeout=absent_s)  # or until it is answered
        for worker in fleet.workers:
            await worker.set_health(True)
        assert (await asked)[0] == status
