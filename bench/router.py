"""router: what the router adds to its workers, and how much it can carry.

The workers are stand-ins without a model, so nothing but calls and messages is measured. Router and
bare proxy run on one core, stand-ins and clients on the other. The router traces and detokenises.

* Overhead: TTFT and time per token at ``--concurrency``, against calling both workers directly.
* Message rate: messages of one token each that reach the clients per second, from a router that
  merges none to save messages (``--coalesce-s 0``), against a proxy that only forwards. What it
  merges because a client is slow counts as one message, so merging never flatters it.
* Tokens per second, when the workers put ``--coalesced`` tokens into a message.
* Streams: ``--streams`` at once; how many finish, and the router's resident memory after it all.
"""

import argparse
import asyncio
import contextlib
import functools
import os
import sys
import tempfile
from collections.abc import Awaitable, Callable, Iterator
from contextlib import AsyncExitStack, ExitStack
from pathlib import Path
from typing import Any

import grpc
import psutil
from rich.console import Console
from rich.table import Table

from bench.harness import Sample, ratio
from bench.line_process import LineProcess
from bench.outcome import Outcome
from bench.streams import Ask, at_once, directly, p50, rates, through_router
from epd.fleet.process import ServiceProcess
from epd.telemetry.otlp_receiver import OtlpReceiver
from epd.telemetry.span_store import SpanStore
from epd.v1.decode_pb2_grpc import DecodeServiceStub
from epd.v1.prefill_pb2_grpc import PrefillServiceStub
from epd.v1.router_pb2_grpc import RouterServiceStub

PACED = {"prefill_s": 0.03, "token_s": 0.01, "tokens_per_message": 1}
_READY_S = 120.0


def configure(parser: argparse.ArgumentParser) -> None:
    """Adds this benchmark's options."""
    parser.add_argument("--model", type=Path, default=Path("models/shapes-vl"), help="tokenizer")
    parser.add_argument("--quick", action="store_true", help="a fraction of the work")
    parser.add_argument("--rounds", type=int, help="rounds of A B B A; default 5, quick 1")
    parser.add_argument("--concurrency", type=int, default=8)
    parser.add_argument("--coalesced", type=int, default=32, help="tokens per worker message")
    parser.add_argument("--streams", type=int, help="streams at once; default 1000, quick 200")


def run(options: argparse.Namespace) -> Outcome:
    """Measures."""
    cores = sorted(os.sched_getaffinity(0))
    here, there = cores[0], cores[-1]
    with (
        tempfile.TemporaryDirectory(prefix="epd-bench-") as folder,
        _on_core(here),
        OtlpReceiver(SpanStore()) as receiver,
        LineProcess("bench.stand_in_process", env=os.environ) as stand_in,
        ExitStack() as routers,
    ):
        addresses = stand_in.ask("addresses")
        env = {**os.environ, "OTEL_EXPORTER_OTLP_ENDPOINT": receiver.endpoint}
        start = functools.partial(_router, routers, options.model, addresses, env, Path(folder))
        with _on_core(there):
            router = start("router")
            unmerged = start("unmerged", "--coalesce-s=0")
            proxy = LineProcess("bench.bare_proxy_process", addresses["decode"], env=os.environ)
        with proxy:
            addresses |= {
                "proxy": proxy.ask("address"),
                "router": router.address,
                "unmerged": unmerged.address,
            }
            return asyncio.run(_Bench(options, stand_in, addresses, router.pid).run())


@contextlib.contextmanager
def _on_core(core: int) -> Iterator[None]:
    """What is started meanwhile runs on this core with every thread: a process inherits it."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {core})
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


def _router(
    routers: ExitStack,
    model: Path,
    addresses: dict[str, str],
    env: dict[str, str],
    folder: Path,
    name: str,
    *flags: str,
) -> ServiceProcess:
    command = [sys.executable, "-m", "services.router", f"--model={model}", "--follow-stdin"]
    command += [f"--{role}s={addresses[role]}" for role in ("prefill", "decode")]
    process = ServiceProcess("router", name, [*command, *flags], env, folder)
    process.start()
    routers.callback(process.kill)
    process.wait_ready(_READY_S)
    return process


class _Bench:
    """The measurements, on open channels."""

    def __init__(
        self,
        options: argparse.Namespace,
        stand_in: LineProcess,
        addresses: dict[str, str],
        router_pid: int,
    ) -> None:
        self._quick = options.quick
        self._rounds = options.rounds or (1 if options.quick else 5)
        self._concurrency = options.concurrency
        self._coalesced = options.coalesced
        self._streams = options.streams or (200 if options.quick else 1000)
        self._stand_in = stand_in
        self._addresses = addresses
        self._router_pid = router_pid
        self._raw: list[Sample] = []

    async def run(self) -> Outcome:
        """Everything, one after the other."""
        async with AsyncExitStack() as stack:

            async def channel(address: str) -> grpc.aio.Channel:
                return await stack.enter_async_context(grpc.aio.insecure_channel(address))

            router = RouterServiceStub(await channel(self._addresses["router"]))
            unmerged = RouterServiceStub(await channel(self._addresses["unmerged"]))
            prefill = PrefillServiceStub(await channel(self._addresses["prefill"]))
            decode = DecodeServiceStub(await channel(self._addresses["decode"]))
            proxy = DecodeServiceStub(await channel(self._addresses["proxy"]))

            async def routed(tokens: int) -> Any:
                return await through_router(router, tokens)

            async def routed_unmerged(tokens: int) -> Any:
                return await through_router(unmerged, tokens)

            async def direct(tokens: int) -> Any:
                return await directly(prefill, decode, tokens)

            async def forwarded(tokens: int) -> Any:
                return await directly(prefill, proxy, tokens)

            result = await self._overhead(routed, direct)
            result |= await self._message_rate(routed_unmerged, forwarded)
            result |= await self._tokens_per_s(routed)
            result |= await self._many_streams(routed)
        result["rss_mb"] = round(psutil.Process(self._router_pid).memory_info().rss / 1e6, 1)
        self._print(result)
        return Outcome(result, self._raw)

    async def _overhead(self, routed: Ask, direct: Ask) -> dict[str, float]:
        self._stand_in.ask("pace", **PACED)
        requests = self._concurrency * (2 if self._quick else 6)

        async def measure(ask: Ask) -> dict[str, float]:
            timings = await at_once(ask, requests, self._concurrency, 33)
            return {
                "ttft_ms": p50([timing.ttft_s for timing in timings]) * 1e3,
                "per_token_ms": p50([timing.per_token_s for timing in timings]) * 1e3,
            }

        found = await self._turns({"router": routed, "direct": direct}, measure)
        return {
            "ttft_overhead_ms_p50": _difference(found["ttft_ms"]),
            "per_token_overhead_ms_p50": _difference(found["per_token_ms"]),
        }

    async def _message_rate(self, routed: Ask, forwarded: Ask) -> dict[str, float]:
        self._stand_in.ask("pace", prefill_s=0.0, token_s=0.0, tokens_per_message=1)
        tokens = 300 if self._quick else 3000

        async def measure(ask: Ask) -> dict[str, float]:
            found = await rates(ask, self._concurrency, tokens)
            return {
                "messages_per_s": found.messages_per_s,
                "tokens_per_message": found.tokens_per_s / found.messages_per_s,
            }

        found = await self._turns({"router": routed, "proxy": forwarded}, measure)
        samples = found["messages_per_s"]
        merged = [s.value for s in found["tokens_per_message"] if s.arm == "router"]
        return {
            "message_rate_over_bare_proxy": round(ratio(samples, "router", "proxy").value, 3),
            "messages_per_s": round(p50([s.value for s in samples if s.arm == "router"])),
            "tokens_per_message": round(p50(merged), 3),
        }

    async def _tokens_per_s(self, routed: Ask) -> dict[str, float]:
        self._stand_in.ask("pace", prefill_s=0.0, token_s=0.0, tokens_per_message=self._coalesced)
        tokens = 5_000 if self._quick else 50_000
        found = [
            (await rates(routed, self._concurrency, tokens)).tokens_per_s
            for _ in range(self._rounds)
        ]
        self._raw += [Sample("router:tokens_per_s", n, n, value) for n, value in enumerate(found)]
        return {"tokens_per_s": round(p50(found))}

    async def _many_streams(self, routed: Ask) -> dict[str, float]:
        self._stand_in.ask("pace", prefill_s=0.01, token_s=0.1, tokens_per_message=1)
        done = await asyncio.gather(
            *(routed(10) for _ in range(self._streams)), return_exceptions=True
        )
        finished = [timing for timing in done if not isinstance(timing, BaseException)]
        return {"streams_finished": sum(timing.tokens == 10 for timing in finished)}

    async def _turns(
        self,
        arms: dict[str, Ask],
        measure: Callable[[Ask], Awaitable[dict[str, float]]],
    ) -> dict[str, list[Sample]]:
        """A B B A in every round, after one unmeasured run of each; samples by quantity."""
        (first, run_first), (second, run_second) = arms.items()
        await measure(run_first)
        await measure(run_second)
        order = ((first, run_first), (second, run_second), (second, run_second), (first, run_first))
        found: dict[str, list[Sample]] = {}
        for number in range(self._rounds):
            for arm, ask in order:
                for name, value in (await measure(ask)).items():
                    found.setdefault(name, []).append(Sample(arm, number, number, value))
        for name, samples in found.items():
            self._raw += [Sample(f"{s.arm}:{name}", s.round, s.seed, s.value) for s in samples]
        return found

    def _print(self, result: dict[str, Any]) -> None:
        table = Table(title=f"Router before stand-in workers, {self._concurrency} at once")
        table.add_column("quantity")
        table.add_column("value", justify="right")
        for name, value in result.items():
            table.add_row(name, f"{value:,}")
        Console().print(table)


def _difference(samples: list[Sample]) -> float:
    """Router minus direct: the median over rounds of the difference of means."""

    def mean(arm: str, number: int) -> float:
        values = [s.value for s in samples if (s.arm, s.round) == (arm, number)]
        return sum(values) / len(values)

    rounds = {sample.round for sample in samples}
    return round(p50([mean("router", n) - mean("direct", n) for n in rounds]), 3)
