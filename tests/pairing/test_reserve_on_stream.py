"""Reserves on the pair's stream: both real ends over a real connection, the receiver stands in."""

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

import grpc
import pytest
from google.protobuf import any_pb2
from google.rpc import code_pb2, status_pb2

from epd.errors import (
    DeadlineExceededError,
    DuplicateRequestError,
    EpdError,
    InternalError,
    InvalidRequestError,
    ResourceExhaustedError,
    UnavailableError,
)
from epd.handover.control import DecodeControl, Reservation
from epd.rpc.server_calls import ServerCalls
from epd.telemetry.setup import start_telemetry
from epd.transfer.base import Segment
from epd.v1 import decode_pb2, decode_pb2_grpc
from services.decode.pairing import Pairings, PairingTerms
from services.decode.reserving import Reserving
from services.prefill import peer_link
from services.prefill.config import PairingConfig
from tests.pairing.test_pairing import LAYOUT, DecodeEnd, agent

#: No test waits for it.
LONG_S = 60.0
MAX_RESERVES = 4


def id_of(name: str) -> str:
    """A transfer id that tells the name."""
    return name.encode().hex().ljust(32, "0")


def reservation(name: str, blocks: int) -> Reservation:
    seal = Segment(0x7F0000001000, 128)
    return Reservation(id_of(name), 7, tuple(range(5, 5 + blocks)), seal, 1, 2.5, checksum=True)


class Receiver:
    """Answers as each test says."""

    def __init__(self) -> None:
        self.asked: list[str] = []
        self.open = asyncio.Event()

    async def reserve(
        self, transfer_id: str, instance_id: str, token_count: int, block_hashes: Sequence[bytes]
    ) -> Reservation:
        assert instance_id == "p1"
        name = bytes.fromhex(transfer_id).rstrip(b"\0").decode()
        self.asked.append(name)
        if name.startswith("wait"):
            await self.open.wait()
        match name:
            case "full":
                raise ResourceExhaustedError("no room", reason="PEER_AT_CAP", retry_after_s=0.25)
            case "wrong":
                raise InvalidRequestError("too many", field="block_hashes")
            case "taken":
                raise DuplicateRequestError("belongs to another")
            case "bug":
                raise ValueError("secret")
        return reservation(name, token_count - len(block_hashes))


#: Statuses of answers that are none, by the name that is answered so.
MALFORMED = {
    "empty": b"",
    "no message": b"\xff\xff",
    "no such code": status_pb2.Status(code=99, message="?").SerializeToString(),
    "bad detail": status_pb2.Status(
        code=code_pb2.UNAVAILABLE,
        details=[any_pb2.Any(type_url="type.googleapis.com/google.rpc.RetryInfo", value=b"\xff")],
    ).SerializeToString(),
}


class MalformedAnswers(Reserving):
    """A decode worker of another making: some of its answers cannot be read."""

    async def answer(self, instance_id: str, request: decode_pb2.Reserve) -> decode_pb2.Reserved:
        name = bytes.fromhex(request.transfer_id).rstrip(b"\0").decode()
        if name in MALFORMED:
            return decode_pb2.Reserved(number=request.number, status=MALFORMED[name])
        return await super().answer(instance_id, request)


@asynccontextmanager
async def pair(
    reserve_timeout_s: float = LONG_S, reserving: type[Reserving] = Reserving
) -> AsyncIterator[tuple[DecodeControl, Receiver]]:
    """What a prefill worker may ask a decode worker, once both are paired."""
    receiver, end = Receiver(), DecodeEnd("d1", LAYOUT, LONG_S, ("local",))
    telemetry = start_telemetry("decode", "d1")
    calls = ServerCalls(telemetry, starts_traces=False)
    end.pairings = Pairings(
        PairingTerms([agent("d1")], LAYOUT, 0.02, LONG_S, MAX_RESERVES),
        end._join,
        end._leave,
        reserving(receiver, calls).answer,  # type: ignore[arg-type]
    )
    server = grpc.aio.server()
    decode_pb2_grpc.add_DecodeServiceServicer_to_server(end, server)
    address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    await server.start()
    config = PairingConfig(
        decodes=(),
        pair_heartbeat_s=0.02,
        pair_silence_s=LONG_S,
        reserve_timeout_s=reserve_timeout_s,
    )

    async def nothing(_: object) -> None:
        pass

    try:
        async with grpc.aio.insecure_channel(address) as channel:
            stub = decode_pb2_grpc.DecodeServiceStub(channel)
            terms = peer_link.PairingTerms([agent("p1")], LAYOUT, config)
            link = peer_link.PeerLink(address, stub, terms, nothing, nothing)
            running = asyncio.create_task(link.run())
            try:
                peer = await link.wait_up(LONG_S)
                receiver.stop = lambda: server.stop(0)  # type: ignore[attr-defined]
                yield peer.target.control, receiver
            finally:
                running.cancel()
                await asyncio.gather(running, return_exceptions=True)
    finally:
        await server.stop(0)
        telemetry.close(0)


async def ask(
    control: DecodeControl, name: str, tokens: int = 1, hashes: Sequence[bytes] = ()
) -> Reservation:
    return await control.reserve(id_of(name), tokens, hashes)


async def until_asked(receiver: Receiver, count: int) -> None:
    async with asyncio.timeout(LONG_S):
        while len(receiver.asked) < count:
            await asyncio.sleep(0.005)


async def test_a_reservation_arrives_as_it_was_granted() -> None:
    async with pair() as (control, _):
        assert await ask(control, "a", 5, [b"h" * 32]) == reservation("a", 4)


async def test_one_that_waits_for_memory_holds_up_no_other() -> None:
    async with pair() as (control, receiver):
        waiting = asyncio.create_task(ask(control, "wait"))
        await until_asked(receiver, 1)
        assert (await ask(control, "b")) == reservation("b", 1)
        assert not waiting.done()
        receiver.open.set()
        assert await waiting == reservation("wait", 1)


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("full", ResourceExhaustedError),
        ("wrong", InvalidRequestError),
        ("taken", DuplicateRequestError),
        ("seventeen letters", InvalidRequestError),
        ("bug", InternalError),
    ],
)
async def test_a_refusal_is_the_same_error_on_the_other_side(
    name: str, kind: type[EpdError]
) -> None:
    async with pair() as (control, _):
        with pytest.raises(kind) as refusal:
            await ask(control, name)
        match refusal.value:
            case ResourceExhaustedError() as full:
                assert (full.reason, full.retry_after_s) == ("PEER_AT_CAP", 0.25)
                assert full.message == "no room"
            case InvalidRequestError() as wrong if name == "wrong":
                assert wrong.field == "block_hashes"
            case InternalError() as bug:
                assert "secret" not in bug.message
        await ask(control, "a")  # the stream is as good as before


async def test_an_answer_that_cannot_be_read_is_the_workers_fault_and_may_be_retried() -> None:
    async with pair(reserving=MalformedAnswers) as (control, _):
        for name in MALFORMED:
            with pytest.raises(UnavailableError) as refusal:
                await ask(control, name)
            assert refusal.value.reason == "MALFORMED_ANSWER"
        await ask(control, "a")  # the stream is as good as before


async def test_one_that_is_given_up_ends_neither_the_stream_nor_the_others() -> None:
    async with pair() as (control, receiver):
        stays = asyncio.create_task(ask(control, "wait-1"))
        for number in range(20):  # cancelled before, while and after they are sent
            task = asyncio.create_task(ask(control, f"gone-{number}"))
            for _ in range(number % 5):
                await asyncio.sleep(0)
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
        async with asyncio.timeout(LONG_S):
            while True:
                with contextlib.suppress(ResourceExhaustedError):  # some may be under way still
                    await ask(control, "a")
                    break
                await asyncio.sleep(0.01)
        receiver.open.set()
        assert await stays == reservation("wait-1", 1)


async def test_the_end_of_the_stream_ends_every_wait_at_once() -> None:
    async with pair() as (control, receiver):
        waiting = [asyncio.create_task(ask(control, f"wait-{n}")) for n in range(3)]
        await until_asked(receiver, 3)
        began = time.monotonic()
        await receiver.stop()  # type: ignore[attr-defined]
        for one in waiting:
            with pytest.raises(UnavailableError, match="is gone"):
                await one
        with pytest.raises(UnavailableError):  # and so does who still knows the former process
            await ask(control, "late")
        assert time.monotonic() - began < LONG_S / 2


async def test_an_answer_that_does_not_come_in_time_is_a_deadline() -> None:
    async with pair(reserve_timeout_s=1.0) as (control, receiver):
        with pytest.raises(DeadlineExceededError):
            await ask(control, "wait")
        receiver.open.set()  # the late answer is nobody's
        assert (await ask(control, "a")) == reservation("a", 1)


async def test_one_peer_has_so_many_under_way_and_no_more() -> None:
    async with pair() as (control, receiver):
        waiting = [asyncio.create_task(ask(control, f"wait-{n}")) for n in range(MAX_RESERVES)]
        await until_asked(receiver, MAX_RESERVES)
        with pytest.raises(ResourceExhaustedError) as refusal:
            await ask(control, "one-more")
        assert refusal.value.reason == "QUEUE_FULL"
        receiver.open.set()
        assert len(await asyncio.gather(*waiting)) == MAX_RESERVES
        await ask(control, "one-more")
