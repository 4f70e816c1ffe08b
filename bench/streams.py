"""One request by each path, and many at once."""

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from statistics import median
from typing import TypeVar

from epd.rpc.request_context import new_id
from epd.v1 import common_pb2, decode_pb2, prefill_pb2, router_pb2
from epd.v1.decode_pb2_grpc import DecodeServiceStub
from epd.v1.prefill_pb2_grpc import PrefillServiceStub
from epd.v1.router_pb2_grpc import RouterServiceStub

PROMPT = tuple(range(20, 84))

T = TypeVar("T")
#: Asks for so many tokens.
Ask = Callable[[int], Awaitable["Timing"]]


@dataclass(frozen=True)
class Timing:
    """Of one answer: seconds to the first token and per further token; tokens, and messages."""

    ttft_s: float
    per_token_s: float
    tokens: int
    messages: int


class _Watch:
    """Notes when tokens come."""

    def __init__(self) -> None:
        self._started_s = time.perf_counter()
        self._first_s = self._last_s = 0.0
        self._tokens = self._messages = 0

    def tokens(self, count: int) -> None:
        self._last_s = time.perf_counter()
        self._first_s = self._first_s or self._last_s
        self._tokens += count
        self._messages += 1

    def timing(self) -> Timing:
        spread_s = (self._last_s - self._first_s) / max(1, self._tokens - 1)
        return Timing(self._first_s - self._started_s, spread_s, self._tokens, self._messages)


async def through_router(stub: RouterServiceStub, tokens: int) -> Timing:
    """As a client of the router, with a short prompt."""
    return await prompt_through_router(stub, PROMPT, tokens)


async def prompt_through_router(
    stub: RouterServiceStub, prompt: Sequence[int], tokens: int
) -> Timing:
    """As a client of the router."""
    watch = _Watch()
    request = router_pb2.GenerateRequest(
        token_prompt=router_pb2.TokenPrompt(token_ids=prompt),
        sampling=common_pb2.SamplingParams(max_tokens=tokens, ignore_eos=True),
    )
    async for response in stub.Generate(request):
        if response.HasField("delta"):
            watch.tokens(len(response.delta.token_ids))
    return watch.timing()


async def directly(prefill: PrefillServiceStub, decode: DecodeServiceStub, tokens: int) -> Timing:
    """Both calls, as the router makes them."""
    watch = _Watch()
    transfer_id = new_id()
    sampling = common_pb2.SamplingParams(max_tokens=tokens, ignore_eos=True)

    async def first() -> None:
        request = prefill_pb2.PrefillRequest(
            transfer_id=transfer_id, token_ids=PROMPT, sampling=sampling
        )
        async for response in prefill.Prefill(request):
            if response.HasField("first_token"):
                watch.tokens(1)

    async def rest() -> None:
        request = decode_pb2.DecodeRequest(
            transfer_id=transfer_id, token_ids=PROMPT, sampling=sampling
        )
        async for response in decode.Decode(request):
            if response.HasField("tokens"):
                watch.tokens(len(response.tokens.token_ids))

    await asyncio.gather(first(), rest())
    return watch.timing()


async def at_once(
    ask: Callable[[int], Awaitable[T]], requests: int, concurrency: int, tokens: int
) -> list[T]:
    """``requests`` answers of ``tokens`` each, so many at a time."""
    slots = asyncio.Semaphore(concurrency)

    async def one() -> T:
        async with slots:
            return await ask(tokens)

    return list(await asyncio.gather(*(one() for _ in range(requests))))


@dataclass(frozen=True)
class Rates:
    """What ``concurrency`` answers brought per second, all together."""

    tokens_per_s: float
    messages_per_s: float


async def rates(ask: Ask, concurrency: int, tokens: int) -> Rates:
    """Of ``concurrency`` answers of ``tokens`` each."""
    started_s = time.perf_counter()
    timings = await at_once(ask, concurrency, concurrency, tokens)
    seconds = time.perf_counter() - started_s
    return Rates(
        sum(timing.tokens for timing in timings) / seconds,
        sum(timing.messages for timing in timings) / seconds,
    )


def p50(values: list[float]) -> float:
    """The median."""
    return median(values)
