"""F36: the first token goes out as soon as it exists."""

import asyncio
import statistics
import time
from pathlib import Path

from epd.v1 import router_pb2
from tests.router.conftest import Fleet
from tests.router.harness import eventually, request, router, running
from tests.router.model_folder import END
from tests.support.answer import collect


async def test_f36_the_first_token_does_not_wait_for_prefills_call_to_end(
    model: Path, fleet: Fleet
) -> None:
    fleet.prefill.hold_open_s = 60
    fleet.prefill.seals = False
    async with running(*fleet.workers), router(model, fleet.workers) as served:
        async with asyncio.timeout(20):
            async for response in served.stub.Generate(request()):
                assert list(response.delta.token_ids)
                break


async def test_the_whole_answer_does_not_wait_for_prefills_call_to_end(
    model: Path, fleet: Fleet
) -> None:
    fleet.prefill.hold_open_s = 60
    settings = {"prefill_linger_s": "0.1"}
    async with running(*fleet.workers), router(model, fleet.workers, **settings) as served:
        async with asyncio.timeout(20):
            answer = await collect(served.stub.Generate(request()))
    assert len(answer.token_ids) == 8


async def test_f36_the_routers_own_share_of_ttft_is_below_3_ms(model: Path, fleet: Fleet) -> None:
    """Everything between the request's arrival and its first token that is not prefill's work.

    3 ms where a bare unary call takes half a millisecond; in proportion on a machine that is busy
    with other things. The lower quartile, since what the scheduler adds is not the router's share:
    work of the router shows in every request.
    """
    shares_s, unary_s = [], []
    async with running(*fleet.workers), router(model, fleet.workers) as served:
        for _ in range(100):
            answer = await collect(served.stub.Generate(request("word " * 60, max_tokens=2)))
            inside_s = fleet.prefill.drawn_s[-1] - fleet.prefill.arrived_s[-1]
            shares_s.append(answer.completion.ttft_ns / 1e9 - inside_s)
            started = time.monotonic()
            await served.stub.GetModel(router_pb2.GetModelRequest())
            unary_s.append(time.monotonic() - started)
    share_s, bare_s = statistics.quantiles(shares_s)[0], statistics.quantiles(unary_s)[0]
    assert share_s < max(0.003, 8 * bare_s)


async def test_when_the_first_token_ends_the_answer_decode_is_cancelled(
    model: Path, fleet: Fleet
) -> None:
    fleet.prefill.first_token_ends = True
    async with running(*fleet.workers), router(model, fleet.workers) as served:
        tokens = []
        async for response in served.stub.Generate(request()):
            tokens += response.delta.token_ids
        assert tokens == [END]
        assert response.completion.finish_reason == 1
        assert response.completion.usage.completion_tokens == 1
        await eventually(lambda: fleet.decode.open_calls == 0)
    assert fleet.decode.emitted == 0
