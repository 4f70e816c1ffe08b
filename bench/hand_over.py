"""One request through a prefill and a decode worker, timed where the router would stand.

All durations are differences of this process's own monotonic clock or are told by a worker as
durations: no two clocks are compared.
"""

import asyncio
import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

import grpc

from epd.v1 import (
    common_pb2,
    decode_pb2,
    decode_pb2_grpc,
    prefill_pb2,
    prefill_pb2_grpc,
    worker_pb2,
    worker_pb2_grpc,
)


@dataclass(frozen=True)
class HandOver:
    """Milliseconds.

    ``exposed``: from the first token's arrival to the news that decode has admitted the request.
    ``second_gap`` and ``later_gap``: between tokens 1 and 2, and the median of the gaps after.
    ``push_exposed`` and ``kv_exposed``: told by prefill, from the forward pass's end to the end of
    the last WRITE, with and without the seal. ``gaps`` are all between tokens, the first included.
    """

    exposed: float
    second_gap: float
    later_gap: float
    push_exposed: float
    kv_exposed: float
    gaps: tuple[float, ...]


class PairClient:
    """Talks to one prefill worker and one decode worker as the router does."""

    def __init__(self, prefill: str, decode: str) -> None:
        self._channels = [grpc.aio.insecure_channel(address) for address in (prefill, decode)]
        self._prefill = prefill_pb2_grpc.PrefillServiceStub(self._channels[0])
        self._decode = decode_pb2_grpc.DecodeServiceStub(self._channels[1])
        self._worker = worker_pb2_grpc.WorkerServiceStub(self._channels[1])
        self._decode_address = decode
        self._instance_id = ""

    async def close(self) -> None:
        """Closes the connections."""
        for channel in self._channels:
            await channel.close(None)

    async def run(
        self,
        token_ids: Sequence[int],
        new_tokens: int,
        admitted: asyncio.Event | None = None,
    ) -> HandOver:
        """One greedy request of exactly ``new_tokens`` output tokens, at least 4. ``admitted`` is
        set once decode has taken it in.
        """
        if not self._instance_id:
            info = await self._worker.GetInfo(worker_pb2.GetInfoRequest())
            self._instance_id = info.instance_id
        transfer_id = uuid.uuid4().hex
        sampling = common_pb2.SamplingParams(max_tokens=new_tokens, ignore_eos=True)
        prefilling = asyncio.create_task(self._run_prefill(transfer_id, token_ids, sampling))
        started_ns, tokens_ns = await self._run_decode(
            transfer_id, token_ids, sampling, admitted or asyncio.Event()
        )
        first_ns, pushed = await prefilling
        gaps = [
            (after - before) / 1e6
            for before, after in zip([first_ns, *tokens_ns], tokens_ns, strict=False)
        ]
        return HandOver(
            exposed=(started_ns - first_ns) / 1e6,
            second_gap=gaps[0],
            later_gap=median(gaps[1:]),
            push_exposed=pushed.exposed_ns / 1e6,
            kv_exposed=pushed.kv_exposed_ns / 1e6,
            gaps=tuple(gaps),
        )

    async def _run_prefill(
        self, transfer_id: str, token_ids: Sequence[int], sampling: common_pb2.SamplingParams
    ) -> tuple[int, prefill_pb2.Pushed]:
        request = prefill_pb2.PrefillRequest(
            request_id=transfer_id,
            transfer_id=transfer_id,
            token_ids=token_ids,
            sampling=sampling,
            decode=prefill_pb2.DecodeTarget(
                address=self._decode_address, instance_id=self._instance_id
            ),
        )
        first_ns, pushed = 0, prefill_pb2.Pushed()
        async for response in self._prefill.Prefill(request):
            if response.HasField("first_token"):
                first_ns = time.monotonic_ns()
            else:
                pushed = response.pushed
        return first_ns, pushed

    async def _run_decode(
        self,
        transfer_id: str,
        token_ids: Sequence[int],
        sampling: common_pb2.SamplingParams,
        admitted: asyncio.Event,
    ) -> tuple[int, list[int]]:
        request = decode_pb2.DecodeRequest(
            request_id=transfer_id,
            transfer_id=transfer_id,
            token_ids=token_ids,
            sampling=sampling,
        )
        started_ns, tokens_ns = 0, []
        async for response in self._decode.Decode(request):
            now_ns = time.monotonic_ns()
            if response.HasField("started"):
                started_ns = now_ns
                admitted.set()
            elif response.HasField("tokens"):
                # Those that waited for this reader come together.
                tokens_ns += [now_ns] * len(response.tokens.token_ids)
        return started_ns, tokens_ns
