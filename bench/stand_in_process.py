"""A prefill and a decode worker without a model: what a router costs is measured against them.

``python -m bench.stand_in_process`` is driven by lines (see :mod:`bench.line_server`).
"""

import asyncio
from collections.abc import AsyncIterator, Iterator
from typing import Any

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from bench.line_server import serve_lines
from epd.rpc.request_context import new_id
from epd.rpc.worker_service import WorkerServicer
from epd.v1 import (
    common_pb2,
    decode_pb2,
    decode_pb2_grpc,
    prefill_pb2,
    prefill_pb2_grpc,
    worker_pb2,
    worker_pb2_grpc,
)

CONTEXT_LENGTH = 1 << 20
#: Ids that any tokenizer has and that end nothing.
_FIRST_ID, _IDS = 20, 64


class StandIn(prefill_pb2_grpc.PrefillServiceServicer, decode_pb2_grpc.DecodeServiceServicer):
    """Draws a first token after ``prefill_s``, then messages of tokens, ``token_s`` per token."""

    def __init__(self) -> None:
        self.prefill_s = 0.0
        self.token_s = 0.0
        self.tokens_per_message = 1
        self._sealed: dict[str, asyncio.Event] = {}

    async def Prefill(
        self, request: prefill_pb2.PrefillRequest, context: Any
    ) -> AsyncIterator[prefill_pb2.PrefillResponse]:
        await asyncio.sleep(self.prefill_s)
        yield prefill_pb2.PrefillResponse(
            first_token=prefill_pb2.FirstToken(
                token_id=_FIRST_ID,
                timings=[
                    common_pb2.StageTiming(stage="prefill", duration_ns=int(self.prefill_s * 1e9))
                ],
            )
        )
        self._seal(request.transfer_id).set()
        yield prefill_pb2.PrefillResponse(pushed=prefill_pb2.Pushed())

    async def Decode(
        self, request: decode_pb2.DecodeRequest, context: Any
    ) -> AsyncIterator[decode_pb2.DecodeResponse]:
        await self._seal(request.transfer_id).wait()
        del self._sealed[request.transfer_id]
        yield decode_pb2.DecodeResponse(started=decode_pb2.Started())
        for tokens in self._messages(request.sampling.max_tokens - 1):
            if self.token_s:
                await asyncio.sleep(self.token_s * len(tokens.token_ids))
            yield decode_pb2.DecodeResponse(tokens=tokens)
        yield decode_pb2.DecodeResponse(
            finished=decode_pb2.Finished(finish_reason=common_pb2.FINISH_REASON_LENGTH)
        )

    def _messages(self, count: int) -> Iterator[decode_pb2.Tokens]:
        for start in range(0, count, self.tokens_per_message):
            end = min(count, start + self.tokens_per_message)
            ids = [_FIRST_ID + index % _IDS for index in range(start, end)]
            yield decode_pb2.Tokens(token_ids=ids, logprobs=[-0.5] * len(ids))

    def _seal(self, transfer_id: str) -> asyncio.Event:
        return self._sealed.setdefault(transfer_id, asyncio.Event())


async def _serve(stand_in: StandIn, role: worker_pb2.WorkerRole) -> tuple[grpc.aio.Server, str]:
    server = grpc.aio.server(options=[("grpc.so_reuseport", 0)])
    info = worker_pb2.GetInfoResponse(
        role=role,
        instance_id=new_id(),
        model_name="stand-in",
        model_digest="stand-in",
        context_length=CONTEXT_LENGTH,
        kv_layout=common_pb2.KvLayout(block_size=32, dtype="float32"),
    )
    load = worker_pb2.WatchLoadResponse(instance_id=info.instance_id)
    healthy = health.aio.HealthServicer()  # type: ignore[attr-defined]
    health_pb2_grpc.add_HealthServicer_to_server(healthy, server)
    worker_pb2_grpc.add_WorkerServiceServicer_to_server(
        WorkerServicer(lambda: info, lambda: load, heartbeat_s=0.25, kv_events=_no_events), server
    )
    prefill_pb2_grpc.add_PrefillServiceServicer_to_server(stand_in, server)
    decode_pb2_grpc.add_DecodeServiceServicer_to_server(stand_in, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    await healthy.set("", health_pb2.HealthCheckResponse.SERVING)
    for name in ("Prefill", "Decode"):
        await healthy.set(f"epd.v1.{name}Service", health_pb2.HealthCheckResponse.SERVING)
    return server, f"127.0.0.1:{port}"


async def _no_events() -> AsyncIterator[worker_pb2.WatchKvEventsResponse]:
    yield worker_pb2.WatchKvEventsResponse(cleared=True)
    await asyncio.Event().wait()


async def main() -> None:
    """Serves until standard input ends."""
    stand_in = StandIn()
    prefill, prefill_address = await _serve(stand_in, worker_pb2.WORKER_ROLE_PREFILL)
    decode, decode_address = await _serve(stand_in, worker_pb2.WORKER_ROLE_DECODE)

    async def addresses() -> dict[str, str]:
        return {"prefill": prefill_address, "decode": decode_address}

    async def pace(prefill_s: float, token_s: float, tokens_per_message: int) -> None:
        stand_in.prefill_s = prefill_s
        stand_in.token_s = token_s
        stand_in.tokens_per_message = tokens_per_message

    await serve_lines({"addresses": addresses, "pace": pace})
    await prefill.stop(0)
    await decode.stop(0)


if __name__ == "__main__":
    asyncio.run(main())
