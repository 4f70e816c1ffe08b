"""A prompt that is too long is told so at once, however long the line."""

from pathlib import Path

from epd.rpc.status import error_from_rpc
from tests.router.conftest import Fleet
from tests.router.harness import eventually, failure, request, router, running
from tests.router.model_folder import CONTEXT_LENGTH


async def test_f23_a_prompt_that_is_too_long_waits_for_no_turn(model: Path, fleet: Fleet) -> None:
    fleet.prefill.prefill_s = 60
    settings = {"prefill_ahead": "1", "queue_wait_s": "5"}
    async with running(*fleet.workers), router(model, fleet.workers, **settings) as served:
        first = served.stub.Generate(request())
        await eventually(lambda: fleet.prefill.open_calls == 1)
        error = error_from_rpc(await failure(served.stub.Generate(request("x" * CONTEXT_LENGTH))))
        assert (error.code, error.reason) == ("INVALID_ARGUMENT", "PROMPT_TOO_LONG")
        first.cancel()
