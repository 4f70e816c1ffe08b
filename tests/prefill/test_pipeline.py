"""What a Prefill call does with a push that goes wrong."""

import asyncio
from types import SimpleNamespace
from typing import Any, cast

import pytest
from opentelemetry.trace import NoOpTracer

from epd.errors import TransferFailedError
from epd.sampling import SamplingParams
from epd.transfer.local_backend import LocalFabric
from epd.worker.stages import Stages
from services.prefill.peer_link import DecodePeer
from services.prefill.pipeline import PrefillPipeline
from services.prefill.request import PrefillJob
from tests.handover.sides import Pair, make_pair

TOKENS = 40


class Computation:
    """Computes all layers of a prompt; the first token is drawn when the test says so."""

    def __init__(self, pair: Pair) -> None:
        self._prefill = pair.prefill
        self._blocks: list[int] = []

    async def run(self, job: PrefillJob, engine_id: str, *_: object) -> Any:
        self._blocks = self._prefill.pool.allocate(3) or []
        await asyncio.to_thread(self._prefill.compute, engine_id, self._blocks, TOKENS)
        await asyncio.Event().wait()

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


async def nothing_is_sent(_: object) -> None:
    raise AssertionError("there is no first token")


async def test_a_write_that_fails_beside_the_computation_is_counted_as_a_failed_push() -> None:
    async with make_pair("local", LocalFabric()).running() as pair:
        pair.prefill.faults.fail_post = {2}
        kv = KvMetrics()
        pipeline = PrefillPipeline(
            cast(Any, None),
            cast(Any, Peers(pair)),
            cast(Any, None),
            cast(Any, Computation(pair)),
            pair.prefill.sender,
            cast(Any, SimpleNamespace(kv=kv)),
        )
        with pytest.raises(TransferFailedError, match="WRITE 2 cannot be posted"):
            await pipeline._hand_over(
                job(), None, cast(Any, None), Stages(NoOpTracer()), nothing_is_sent
            )
        assert kv.failures == 1
        await pair.idle()
