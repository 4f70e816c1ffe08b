"""F36: the first token goes out as soon as it exists."""

import statistics
import time
from pathlib import Path

from epd.v1 import router_pb2
from tests.router.conftest import Fleet
from tests.router.harness import collect, request, router, running
from tests.router.model_folder import END


async def test_f36_the_first_token_does_not_wait_for_prefills_call_to_end(
    model: Path, fleet: Fleet
) -> None:
    fleet.prefill.hold_open_s = 1.0
    fleet.prefill.seals = False
    async with running(*fleet.workers), router(model, fleet.workers) as served:
        started = time.monotonic()
        async for response in served.stub.Generate(request()):
            first_s = time.monotonic() - started
            assert list(response.delta.token_ids)
            break
    assert first_s < 0.5


async def test_the_whole_answer_does_not_wait_for_prefills_call_to_end(
    model: Path, fleet: Fleet
) -> None:
    fleet.prefill.hold_open_s = 1.0
    async with running(*fleet.workers), router(model, fleet.workers) as served:
        started = time.monotonic()
        async for response in served.stub.Generate(request()):
            if response.HasField("completion"):
                completed_s = time.monotonic() - started
    assert completed_s < 0.5


async def test_f36_the_routers_own_share_of_ttft_is_below_3_ms(model: Path, fleet: Fleet) -> None:
    """Everything between the request's arrival and its first token that is not prefill's work.

    3 ms where a bare unary call takes half a millisecond; in proportion on a machine that is busy
    with other things.
    """
    shares_s, unary_s = [], []
    async with running(*fleet.workers), router(model, fleet.workers) as served:
        for _ in range(100):
            answer = await collect(served.stub.Generate(request("word " * 60, max_tokens=2)))
            assert answer.completion is not None
            inside_s = fleet.prefill.drawn_s[-1] - fleet.prefill.arrived_s[-1]
            shares_s.append(answer.completion.ttft_ns / 1e9 - inside_s)
            started = time.monotonic()
            await served.stub.GetModel(router_pb2.GetModelRequest())
            unary_s.append(time.monotonic() - started)
    assert statistics.median(shares_s) < max(0.003, 6 * statistics.median(unary_s))


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
    assert fleet.decode.open_calls == 0
    assert fleet.decode.emitted == 0
