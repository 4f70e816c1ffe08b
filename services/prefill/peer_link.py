"""The tie to one decode worker, made ahead of traffic and kept as long as it lives."""

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import grpc

from epd.engine.kv_layout import KvLayout, check_compatible
from epd.errors import EpdError, LayoutMismatchError, UnavailableError
from epd.handover.control import PushTarget
from epd.rpc.status import error_from_rpc
from epd.transfer.base import AgentDescriptor
from epd.transfer.negotiation import negotiate
from epd.v1 import decode_pb2, decode_pb2_grpc
from epd.wire.kv_layout import layout_from_proto, layout_to_proto
from epd.wire.transfer import agents_from_proto, agents_to_proto
from services.prefill.config import PairingConfig
from services.prefill.decode_control import GrpcDecodeControl
from services.prefill.reserve_calls import ReserveCalls, Traced, untraced

PairCall: TypeAlias = "grpc.aio.StreamStreamCall[decode_pb2.PairRequest, decode_pb2.PairResponse]"

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class DecodePeer:
    """A decode process this one may push to."""

    address: str
    target: PushTarget

    @property
    def instance_id(self) -> str:
        """The process start; another one at the same address is another peer."""
        return self.target.instance_id


@dataclass(frozen=True)
class PairingTerms:
    """This side of every pair."""

    agents: Sequence[AgentDescriptor]
    layout: KvLayout
    config: PairingConfig


class PeerLink:
    """Pairs with whatever process answers at one address, again and again.

    Args:
        address: The decode worker's gRPC address.
        stub: Its service.
        terms: What this side says and how long it waits.
        join: Called with a new peer before it is used: connect, warm up. The link is not up until
            it returns.
        leave: Called once for each peer that had joined, when its stream ended or fell silent.
        traced: Goes around every Reserve.
    """

    def __init__(
        self,
        address: str,
        stub: decode_pb2_grpc.DecodeServiceStub,
        terms: PairingTerms,
        join: Callable[[DecodePeer], Awaitable[None]],
        leave: Callable[[DecodePeer], Awaitable[None]],
        traced: Traced = untraced,
    ) -> None:
        self.address = address
        self.peer: DecodePeer | None = None
        #: Why there is no peer; the last pairing's failure, typed.
        self.failure: EpdError = UnavailableError(f"decode worker {address} is not paired yet")
        self._stub = stub
        self._terms = terms
        self._config = terms.config
        self._join = join
        self._leave = leave
        self._traced = traced
        self._changed = asyncio.Condition()

    async def wait_up(self, timeout_s: float) -> DecodePeer:
        """The peer, as soon as there is one.

        Raises:
            EpdError: :attr:`failure`, after ``timeout_s`` or at once when the layouts do not fit.
        """
        try:
            async with asyncio.timeout(timeout_s), self._changed:
                await self._changed.wait_for(
                    lambda: self.peer is not None or isinstance(self.failure, LayoutMismatchError)
                )
        except TimeoutError:
            pass
        if self.peer is None:
            raise type(self.failure)(self.failure.message, reason=self.failure.reason)
        return self.peer

    async def run(self) -> None:
        """Keeps the pair until cancelled. Whatever goes wrong with one worker is no reason to lose
        the others: an error that is not understood is told once, with its traceback, and like any
        other the pairing is tried again.
        """
        backoff_s = self._config.pair_backoff_s
        while True:
            error: EpdError
            cause: Exception | None = None
            try:
                error = await self._pair()
                backoff_s = self._config.pair_backoff_s
            except EpdError as raised:
                error = raised
                backoff_s = min(backoff_s * 2, self._config.pair_max_backoff_s)
            except Exception as raised:
                error = UnavailableError(
                    f"decode worker {self.address} cannot be paired with: {raised!r}",
                    reason="PAIRING_FAILED",
                )
                cause = raised
                backoff_s = min(backoff_s * 2, self._config.pair_max_backoff_s)
            if (type(error), error.message) != (type(self.failure), self.failure.message):
                logger.warning(
                    "not paired with decode %s: %s", self.address, error.message, exc_info=cause
                )
            await self._set(None, error)
            await asyncio.sleep(backoff_s)

    async def _pair(self) -> UnavailableError:
        """One stream, from hello to its end: why it ended, raised when it did not come up."""
        call = self._stub.Pair()
        reserves = ReserveCalls(self._config.reserve_timeout_s, self._traced)
        try:
            peer = await self._greet(call, reserves)
            gone = UnavailableError(f"decode worker {self.address} is gone", reason="PEER_LOST")
            try:
                await self._join(peer)
                await self._set(peer, None)
                logger.info("paired with decode %s, instance %s", self.address, peer.instance_id)
                reason = await self._converse(call, reserves)
                gone = UnavailableError(f"decode worker {self.address} is gone: {reason}")
                return gone
            finally:
                reserves.close(gone)
                await self._set(None, None)
                await self._leave(peer)
        except grpc.aio.AioRpcError as error:
            raise _typed(error, self.address) from error
        finally:
            call.cancel()

    async def _greet(self, call: PairCall, reserves: ReserveCalls) -> DecodePeer:
        terms = self._terms
        try:
            async with asyncio.timeout(self._config.pair_silence_s):
                hello = decode_pb2.PairRequest(
                    agents=agents_to_proto(terms.agents), kv_layout=layout_to_proto(terms.layout)
                )
                # A call that has failed already takes no writes; reading tells why.
                with contextlib.suppress(asyncio.InvalidStateError):
                    await call.write(hello)
                answer = await call.read()
        except TimeoutError:
            raise UnavailableError(
                f"decode worker {self.address} did not answer the hello in "
                f"{self._config.pair_silence_s} s"
            ) from None
        if not isinstance(answer, decode_pb2.PairResponse):  # end of stream
            raise UnavailableError(f"decode worker {self.address} ended the pairing")
        layout = layout_from_proto(answer.kv_layout)
        check_compatible(terms.layout, layout)
        _, agent = negotiate(terms.agents, agents_from_proto(answer.agents))
        control = GrpcDecodeControl(self._stub, reserves, self._config.control_timeout_s)
        return DecodePeer(self.address, PushTarget(agent, layout, control))

    async def _converse(self, call: PairCall, reserves: ReserveCalls) -> str:
        """Exchanges heartbeats, Reserves and their answers; returns why that ended."""
        speaking = asyncio.create_task(self._speak(call, reserves))
        try:
            while True:
                async with asyncio.timeout(self._config.pair_silence_s):
                    answer = await call.read()
                if not isinstance(answer, decode_pb2.PairResponse):
                    return "it ended the stream"
                if answer.HasField("reserved"):
                    reserves.answered(answer.reserved)
        except TimeoutError:
            return f"silent for {self._config.pair_silence_s} s"
        except grpc.aio.AioRpcError as error:
            return error.details() or error.code().name
        finally:
            speaking.cancel()
            await asyncio.gather(speaking, return_exceptions=True)

    async def _speak(self, call: PairCall, reserves: ReserveCalls) -> None:
        """Sends Reserves, else heartbeats. A stream that takes no more is noticed by the reader."""
        while True:
            request = None
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._config.pair_heartbeat_s):
                    request = await reserves.outgoing.get()
            await call.write(decode_pb2.PairRequest(reserve=request))

    async def _set(self, peer: DecodePeer | None, failure: EpdError | None) -> None:
        async with self._changed:
            self.peer = peer
            self.failure = failure or self.failure
            self._changed.notify_all()


def _typed(error: grpc.aio.AioRpcError, address: str) -> EpdError:
    text = f"decode worker {address}: {error.details() or error.code().name}"
    if error.code() is grpc.StatusCode.FAILED_PRECONDITION:
        return LayoutMismatchError(text, reason=error_from_rpc(error).reason)
    return UnavailableError(text)
