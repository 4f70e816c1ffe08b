"""Clients that stop reading, before a router process of their own and workers that never wait."""

import asyncio
import os
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import grpc
import psutil
import pytest

from bench.line_process import LineProcess
from epd.fleet.process import ServiceProcess
from epd.v1 import common_pb2, router_pb2
from epd.v1.router_pb2_grpc import RouterServiceStub

MODEL = "models/shapes-vl"
TOKENS_PER_MESSAGE = 64
#: More than anybody lets through who bounds anything: 5 MB of answer on the wire.
ENDLESS = 5_000_000
MIB = 1 << 20
#: What a connection keeps for a client by itself, so that streams stall soon.
WINDOW = [("grpc.http2.lookahead_bytes", 65_536), ("grpc.http2.bdp_probe", 0)]

Call: TypeAlias = (
    "grpc.aio.UnaryStreamCall[router_pb2.GenerateRequest, router_pb2.GenerateResponse]"
)


@dataclass(frozen=True)
class Served:
    """A router, and all that has to do with its answers."""

    router: ServiceProcess
    processes: tuple[psutil.Process, ...]


@pytest.fixture
def served(tmp_path: Path) -> Iterator[Served]:
    """A router; its workers send as fast as they are read."""
    with LineProcess("bench.stand_in_process", env=os.environ) as workers:
        addresses = workers.ask("addresses")
        workers.ask("pace", prefill_s=0.0, token_s=0.0, tokens_per_message=TOKENS_PER_MESSAGE)
        command = [sys.executable, "-m", "services.router", f"--model={MODEL}", "--follow-stdin"]
        command += [f"--{role}s={addresses[role]}" for role in ("prefill", "decode")]
        process = ServiceProcess("router", "router", command, os.environ, tmp_path)
        process.start()
        try:
            process.wait_ready(120.0)
            yield Served(process, (psutil.Process(process.pid), psutil.Process(workers.pid)))
        finally:
            process.kill()
            print(process.log()[-4000:])  # shown where the test failed


def ask(stub: RouterServiceStub, tokens: int) -> Call:
    sampling = common_pb2.SamplingParams(max_tokens=tokens, ignore_eos=True)
    prompt = router_pb2.TokenPrompt(token_ids=range(20, 84))
    return stub.Generate(router_pb2.GenerateRequest(token_prompt=prompt, sampling=sampling))


async def idle(processes: Sequence[psutil.Process]) -> None:
    """Waits until the processes have nothing to do: every stream is held up.

    One that is kept from working takes no time of a core either, but it does not sleep.
    """
    async with asyncio.timeout(240):
        calm = 0
        while calm < 3:
            before_s = [sum(process.cpu_times()[:2]) for process in processes]
            asleep = True
            for _ in range(8):
                await asyncio.sleep(0.05)
                asleep &= sum(one.status() != psutil.STATUS_SLEEPING for one in processes) == 0
            spent_s = [sum(process.cpu_times()[:2]) for process in processes]
            busy = any(now - before >= 0.08 for now, before in zip(spent_s, before_s, strict=True))
            calm = 0 if busy or not asleep else calm + 1


async def messages_until(call: Call, tokens: int) -> list[Sequence[int]]:
    """The tokens of each message, until one brings so many."""
    found: list[Sequence[int]] = []
    while not found or len(found[-1]) < tokens:
        response = await call.read()
        assert isinstance(response, router_pb2.GenerateResponse), "the stream has ended"
        found.append(list(response.delta.token_ids))
    return found


@pytest.mark.timeout(600)
async def test_stalled_clients_cost_bounded_memory_and_nobody_elses_time(
    served: Served, full_run: bool
) -> None:
    clients = 1000 if full_run else 100
    process = served.processes[0]
    async with (
        grpc.aio.insecure_channel(served.router.address, WINDOW) as stalled,
        grpc.aio.insecure_channel(served.router.address) as brisk,
    ):
        stub = RouterServiceStub(stalled)
        before = process.memory_info().rss
        calls: list[Call] = []
        firsts: list[Any] = []
        # By and by: a server takes in one call per turn of its event loop, and gRPC gives up those
        # that wait for it for 30 s.
        while len(calls) < clients:
            calls += [ask(stub, ENDLESS) for _ in range(100)]
            firsts += await asyncio.gather(*(call.read() for call in calls[-100:]))
            # They read no more. Were nothing bounded, this would take until all is in memory.
            await idle(served.processes)
        held = process.memory_info().rss

        async with asyncio.timeout(120):  # whoever is held up by them waits for ever
            for _ in range(10):
                answer = [r async for r in ask(RouterServiceStub(brisk), 2_000)]
                assert sum(len(r.delta.token_ids) for r in answer) == 2_000
        assert process.memory_info().rss < held + 16 * MIB, "it grows while nobody reads"
        assert held < before + 32 * MIB + clients * MIB

        # One reads on: nothing is missing, and what had come meanwhile is one message.
        async with asyncio.timeout(120):
            later = await messages_until(calls[0], 4 * TOKENS_PER_MESSAGE)
        first = list(firsts[0].delta.token_ids)
        assert len(first) == 1, "the first token waits for no other"
        tokens = [token for message in later for token in message]
        assert tokens == [20 + place % 64 for place in range(len(tokens))]
        for call in calls:
            call.cancel()
        await everything_is_given_back(RouterServiceStub(brisk))


async def everything_is_given_back(stub: RouterServiceStub) -> None:
    async with asyncio.timeout(60):
        while True:
            workers = (await stub.GetModel(router_pb2.GetModelRequest())).workers
            if not any(worker.in_flight for worker in workers):
                return
            await asyncio.sleep(0.05)
