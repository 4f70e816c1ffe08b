"""The prefill processes that may push KV here, each tied by one stream."""

import asyncio
import functools
import logging
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import grpc

from epd.engine.kv_layout import KvLayout, check_compatible
from epd.errors import InvalidRequestError, NotFoundError, UnavailableError
from epd.transfer.base import AgentDescriptor
from epd.transfer.negotiation import negotiate
from epd.v1 import decode_pb2
from epd.wire.kv_layout import layout_from_proto, layout_to_proto
from epd.wire.transfer import agents_from_proto, agents_to_proto
from services.decode.reserve_answers import ReserveAnswers

PairContext: TypeAlias = "grpc.aio.ServicerContext[decode_pb2.PairRequest, decode_pb2.PairResponse]"

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class PairingTerms:
    """This side of every pair, and its bounds in seconds."""

    agents: Sequence[AgentDescriptor]
    layout: KvLayout
    heartbeat_s: float
    silence_s: float
    #: Reserves of one peer that may be under way at once.
    max_reserves: int


class _Stream:
    """Life of one pair stream: told to end by its successor, over when its peer has left."""

    def __init__(self) -> None:
        self.replaced = asyncio.Event()
        self.over = asyncio.Event()

    async def until_replaced(self) -> None:
        await self.replaced.wait()
        raise UnavailableError("this process has paired anew", reason="PAIRED_AGAIN")


class Pairings:
    """Who is paired now. A peer is gone when its stream ends, fails or falls silent.

    Args:
        terms: What this side says and how long it waits.
        join: Called with a new peer's endpoint before it is answered.
        leave: Called once for each peer that had joined.
        reserve: Answers a Reserve of the peer of that instance id.
    """

    def __init__(
        self,
        terms: PairingTerms,
        join: Callable[[AgentDescriptor], Awaitable[None]],
        leave: Callable[[AgentDescriptor], Awaitable[None]],
        reserve: Callable[[str, decode_pb2.Reserve], Awaitable[decode_pb2.Reserved]],
    ) -> None:
        self._terms = terms
        self._join = join
        self._leave = leave
        self._reserve = reserve
        self._peers: dict[str, AgentDescriptor] = {}
        self._streams: dict[str, _Stream] = {}
        self._departures: set[asyncio.Task[None]] = set()

    def __len__(self) -> int:
        return len(self._peers)

    def peer(self, instance_id: str) -> AgentDescriptor:
        """The paired process of that start.

        Raises:
            NotFoundError: it is not paired (any more).
        """
        try:
            return self._peers[instance_id]
        except KeyError:
            raise NotFoundError(
                f"prefill instance {instance_id} is not paired with this worker",
                reason="NOT_PAIRED",
            ) from None

    async def serve(self, context: PairContext) -> None:
        """Runs one stream from hello to its end.

        Raises:
            InvalidRequestError: the first message is no hello.
            LayoutMismatchError: KV layouts or transports do not fit; both values are named.
            UnavailableError: no hello came, the peer fell silent or has paired anew.
        """
        agent = await self._greet(context)
        # A process that pairs again has given up its former stream, whether or not this side has
        # noticed: that one must be over before its successor counts.
        while (former := self._streams.get(agent.instance_id)) is not None:
            former.replaced.set()
            await former.over.wait()
        stream = self._streams[agent.instance_id] = _Stream()
        try:
            await self._join(agent)
            self._peers[agent.instance_id] = agent
            logger.info("paired with prefill instance %s", agent.instance_id)
            await self._converse(context, agent.instance_id, stream)
        finally:
            self._peers.pop(agent.instance_id, None)
            # Runs to its end even when this call is cancelled: the peer's leases depend on it.
            departure = asyncio.create_task(self._depart(agent, stream))
            self._departures.add(departure)
            departure.add_done_callback(self._departures.discard)
            await asyncio.shield(departure)

    async def _greet(self, context: PairContext) -> AgentDescriptor:
        try:
            async with asyncio.timeout(self._terms.silence_s):
                hello = await context.read()
        except TimeoutError:
            raise UnavailableError(f"no hello within {self._terms.silence_s} s") from None
        if not isinstance(hello, decode_pb2.PairRequest) or not hello.agents:
            raise InvalidRequestError("the first message must name an agent", field="agents")
        check_compatible(self._terms.layout, layout_from_proto(hello.kv_layout))
        agent, _ = negotiate(agents_from_proto(hello.agents), self._terms.agents)
        return agent

    async def _converse(self, context: PairContext, instance_id: str, stream: _Stream) -> None:
        """Answers hello and Reserves and exchanges heartbeats until one side has enough."""
        turn = asyncio.Lock()

        async def write(message: decode_pb2.PairResponse) -> None:
            async with turn:  # gRPC takes one message at a time
                await context.write(message)

        await write(
            decode_pb2.PairResponse(
                agents=agents_to_proto(self._terms.agents),
                kv_layout=layout_to_proto(self._terms.layout),
            )
        )
        answers = ReserveAnswers(
            functools.partial(self._reserve, instance_id), write, self._terms.max_reserves
        )
        parts = [
            asyncio.create_task(part)
            for part in (
                self._listen(context, answers),
                self._beat(write),
                stream.until_replaced(),
            )
        ]
        try:
            done, _ = await asyncio.wait(parts, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for part in parts:
                part.cancel()
            answers.close()
        for part in done:
            part.result()

    async def _depart(self, agent: AgentDescriptor, stream: _Stream) -> None:
        try:
            await self._leave(agent)
            logger.info("prefill instance %s is gone", agent.instance_id)
        finally:
            del self._streams[agent.instance_id]
            stream.over.set()

    async def _listen(self, context: PairContext, answers: ReserveAnswers) -> None:
        try:
            while True:
                async with asyncio.timeout(self._terms.silence_s):
                    message = await context.read()
                    if not isinstance(message, decode_pb2.PairRequest):  # end of stream
                        return
                    if message.HasField("reserve"):
                        # May write, to a peer that does not read.
                        await answers.take(message.reserve)
        except TimeoutError:
            raise UnavailableError(
                f"prefill was silent for {self._terms.silence_s} s", reason="PEER_SILENT"
            ) from None

    async def _beat(self, write: Callable[[decode_pb2.PairResponse], Awaitable[None]]) -> None:
        """Sends heartbeats. A stream that takes no more is noticed by the listening side."""
        while True:
            await asyncio.sleep(self._terms.heartbeat_s)
            await write(decode_pb2.PairResponse())
