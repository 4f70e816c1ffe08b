"""What a Prefill call does with a push that goes wrong."""

import asyncio
import time
from types import SimpleNamespace
from typing import Any, cast

import pytest
from opentelemetry.trace import NoOpTracer

from epd.engine.requests import PrefillDone
from epd.errors import TransferFailedError
from epd.sampling import SamplingParams
from epd.transfer.local_backend import LocalFabric
from epd.v1 import prefill_pb2
from epd.worker.stages import Stages
from services.prefill.peer_link import DecodePeer
from services.prefill.pipeline import PrefillPipeline
from services.prefill.request import PrefillJob
from tests.handover.sides import Pair, eventually, make_pair
from tests.transfer.held import HELD

TOKENS = 40


class Computation:
    """Computes all layers of a prompt and draws the first token, if it is said which."""

    def __init__(self, pair: Pair, done: PrefillDone | None = None) -> None:
        self._prefill = pair.prefill
        self._done = done
        self._blocks: list[int] = []

    async def run(self, job: PrefillJob, engine_id: str, *_: object) -> PrefillDone:
        self._blocks = self._prefill.pool.allocate(3) or []
        await asyncio.to_thread(self._prefill.compute, engine_id, self._blocks, TOKENS)
        if self._done is None:
            await asyncio.Event().wait()
        assert self._done is not None
        return self._done

    def release(self, engine_id: str) -> None:
        self._prefill.pool.free(self._blocks)


class Peers:
    """One decode worker."""

    def __init__(self, pair: Pair) -> None:
        self._peer = DecodePeer("decode:1", pair.target)

    async def find(self, address: str, instance_id: str) -> DecodePeer:
        return self._peer


class KvMetrics:
    def __init__(self) -> None:
        self.failures = 0

    def record_failure(self) -> None:
        self.failures += 1

    def record(self, byte_count: int, transfer_ns: int) -> None:
        """Nothing of interest here."""


def job() -> PrefillJob:
    return PrefillJob(
        request_id="r",
        transfer_id="0123456789abcdef" * 2,
        token_ids=tuple(range(TOKENS)),
        emitted_count=0,
        images=(),
        handles=(),
        pending=frozenset(),
        position_delta=0,
        sampling=SamplingParams(),
        decode_address="decode:1",
        decode_instance_id="d",
    )


def make_pipeline(pair: Pair, kv: KvMetrics, done: PrefillDone | None = None) -> PrefillPipeline:
    return PrefillPipeline(
        cast(Any, None),
        cast(Any, Peers(pair)),
        cast(Any, None),
        cast(Any, Computation(pair, done)),
        pair.prefill.sender,
        cast(Any, SimpleNamespace(kv=kv)),
    )


async def run(pipeline: PrefillPipeline) -> list[prefill_pb2.PrefillResponse]:
    """What a call of one request answers."""
    answers: list[prefill_pb2.PrefillResponse] = []

    async def emit(answer: prefill_pb2.PrefillResponse) -> None:
        answers.append(answer)

    await pipeline._hand_over(job(), None, cast(Any, None), Stages(NoOpTracer()), emit)
    return answers


async def test_a_write_that_fails_beside_the_computation_is_counted_as_a_failed_push() -> None:
    async with make_pair("local", LocalFabric()).running() as pair:
        pair.prefill.faults.fail_post = {2}
        kv = KvMetrics()
        with pytest.raises(TransferFailedError, match="WRITE 2 cannot be posted"):
            await run(make_pipeline(pair, kv))
        assert kv.failures == 1
        await pair.idle()


async def test_a_call_that_is_cancelled_twice_keeps_its_blocks_while_a_write_reads_them() -> None:
    async with make_pair("local", LocalFabric()).running() as pair:
        pair.prefill.faults.delay[1] = HELD
        call = asyncio.create_task(run(make_pipeline(pair, KvMetrics())))
        await eventually(lambda: pair.prefill.faults.writes)
        call.cancel()
        await eventually(lambda: pair.control.count("fail"))
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call
        assert pair.prefill.pool.num_used == 3
        pair.prefill.backend.let_go()
        await pair.idle()


async def test_a_reservation_that_waited_longer_than_a_lease_lasts_is_written_to(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Decode lets a Reserve wait for memory; the lease begins when it is granted."""
    prefill = {"renew_interval_s": 1000}  # the first WRITE comes before the first renewal
    async with make_pair("local", LocalFabric(), prefill=prefill).running() as pair:
        waited_ns = 1000 * 10**9
        reserve = pair.control.reserve

        async def waits(*arguments: Any) -> Any:
            nonlocal waited_ns
            reservation = await reserve(*arguments)
            waited_ns = 0
            return reservation

        monkeypatch.setattr(pair.control, "reserve", waits)
        clock = SimpleNamespace(monotonic_ns=lambda: time.monotonic_ns() - waited_ns)
        monkeypatch.setattr("epd.handover.sender.time", clock)
        done = PrefillDone(42, -0.5, None, 0, 1, time.monotonic_ns(), ())
        first, pushed = await run(make_pipeline(pair, KvMetrics(), done))
        assert first.first_token.token_id == 42
        assert pushed.pushed.write_count == pair.decode.layout.layer_count + 1
        pair.decode.receiver.cancel(job().transfer_id)
        await pair.prefill.sender.close(60)
