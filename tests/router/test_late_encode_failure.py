"""Images that fail while the request waits for a worker."""

import asyncio
from pathlib import Path

from epd.errors import InvalidRequestError
from epd.rpc.status import error_from_rpc
from epd.v1 import router_pb2
from tests.router.conftest import Fleet
from tests.router.harness import eventually, failure, request, router, running


async def test_a_prompt_whose_image_has_failed_meanwhile_is_not_sent_to_prefill(
    model: Path, fleet: Fleet
) -> None:
    fleet.encoder.ready_when = lambda: False
    settings = {"encode_overlap": "true", "worker_patience_s": "30"}
    async with running(*fleet.workers), router(model, fleet.workers, **settings) as served:
        await fleet.decode.set_health(False)
        async with asyncio.timeout(15):
            while all(one.healthy for one in (await _model(served)).workers):
                await asyncio.sleep(0.01)
        asked = asyncio.create_task(failure(served.stub.Generate(request("hi", [b"a"]))))
        await eventually(lambda: bool(fleet.encoder.seen))
        # Planned, so that it waits for a decode worker; only then does the image fail.
        await asyncio.sleep(0.5)
        await fleet.encoder.break_calls(InvalidRequestError("no image", field="images[0]"))
        async with asyncio.timeout(15):
            while any(one.in_flight for one in (await _model(served)).workers):
                await asyncio.sleep(0.01)
        await fleet.decode.set_health(True)
        error = error_from_rpc(await asked)
    assert (error.code, error.message) == ("INVALID_ARGUMENT", "no image")
    assert not fleet.prefill.calls["Prefill"]


async def _model(served) -> router_pb2.GetModelResponse:
    return await served.stub.GetModel(router_pb2.GetModelRequest())
