"""Forced faults do what they are called, and only on purpose."""

import asyncio
import time

import pytest

from epd.config import ConfigError, resolve
from epd.errors import InvalidRequestError, TransferFailedError
from epd.transfer.base import Segment
from epd.transfer.buffer import HostBuffer
from epd.transfer.faults import Chance, Faults, parse_faults
from epd.transfer.local_backend import LocalFabric
from services.prefill.config import PrefillConfig
from tests.transfer.held import HELD, HeldBackend
from tests.transfer.peers import open_agent, wait_until

SIZE = 4096


class Wire:
    """A faulty writer and a reader of its WRITEs."""

    def __init__(self, transport):
        fabric = LocalFabric()
        self.faults = Faults()
        self.arrived: list[tuple[str, bytes]] = []

        def faulty(inner):
            self.backend = HeldBackend(inner, self.faults)
            return self.backend

        self.writer = open_agent(transport, "writer", fabric, None, faulty)
        self.reader = open_agent(transport, "reader", fabric)
        self.source, self.target = HostBuffer(SIZE), HostBuffer(SIZE)
        self.source.view()[:] = 7
        self.writer.register(self.source.segment)
        self.reader.register(self.target.segment)
        self.reader.subscribe(self.arrived.extend)
        self.name = self.reader.descriptor().agent_name
        self.writer.connect(self.reader.descriptor()).result(60)

    def write(self, notice=b"done", guard=None):
        return self.writer.write(
            self.name, [self.source.segment], [self.target.segment], notice, guard
        )

    def close(self):
        self.writer.stop()
        self.reader.stop()


@pytest.fixture(params=["local", "nixl"])
def wire(request):
    made = Wire(request.param)
    yield made
    made.close()


async def notice_of(wire, count=1):
    async with asyncio.timeout(60):
        while len(wire.arrived) < count:
            await asyncio.sleep(0.005)


async def test_a_corrupted_write_arrives_changed_and_with_its_notice(wire):
    wire.faults.corrupt.add(1)
    result = await asyncio.wrap_future(wire.write())
    await notice_of(wire)
    changed = (wire.target.view() != 7).sum()
    assert 1 <= changed <= 8
    assert (wire.source.view() == 7).all(), "the writer's own memory is left alone"
    assert result.byte_count == SIZE
    await asyncio.wrap_future(wire.write())
    assert (wire.target.view() == 7).all()


async def test_a_late_write_lands_after_its_time_and_asks_nobody_any_more(wire):
    wire.faults.late[1] = 0.5
    asked = []
    started = time.monotonic()
    writing = wire.write(guard=lambda: asked.append(bool(wire.target.view().any())))
    while time.monotonic() < started + 0.3:
        assert not wire.target.view().any()
        await asyncio.sleep(0.02)
    await asyncio.wrap_future(writing)
    await notice_of(wire)
    assert time.monotonic() - started >= 0.5
    assert asked == [False]
    assert (wire.target.view() == 7).all()


async def test_a_late_write_to_a_peer_that_has_gone_fails(wire):
    wire.faults.late[1] = HELD
    writing = wire.write()
    await asyncio.to_thread(wait_until, lambda: wire.faults.writes)
    await asyncio.wrap_future(wire.writer.disconnect(wire.name))
    wire.backend.let_go()
    with pytest.raises(TransferFailedError):
        await asyncio.wrap_future(writing)


async def test_failed_and_silent_writes_tell_the_peer_nothing(wire):
    wire.faults.fail_post.add(1)
    wire.faults.fail_running.add(2)
    wire.faults.drop_notice.add(3)
    for _ in range(2):
        with pytest.raises(TransferFailedError):
            await asyncio.wrap_future(wire.write())
    await asyncio.wrap_future(wire.write())
    await asyncio.wrap_future(wire.write(b"fourth"))
    await notice_of(wire)
    assert [message for _, message in wire.arrived] == [b"fourth"]
    assert wire.faults.done == {"fail_post": 1, "fail_running": 1, "drop_notice": 1}


async def test_a_slow_wire_delivers_one_write_after_another(wire):
    wire.faults.rate = SIZE / 0.2
    started = time.monotonic()
    await asyncio.gather(*(asyncio.wrap_future(wire.write()) for _ in range(3)))
    await notice_of(wire, 3)
    assert time.monotonic() - started >= 0.6


def test_a_description_is_read():
    faults = parse_faults(["fail_post@3", "fail_post@5", "late@2:1.5", "corrupt%0.5", "late%1:2"])
    assert faults.fail_post == {3, 5}
    assert faults.late == {2: 1.5}
    assert faults.rate == parse_faults(["rate=8e6"]).rate - 8e6 == 0
    assert faults.chances == {"corrupt": Chance(0.005), "late": Chance(0.01, 2.0)}


def test_equal_seeds_strike_the_same_transfers():
    def struck(seed):
        faults = parse_faults([f"seed={seed}", "fail_post%20"])
        return [number for number in range(200) if faults.strikes("fail_post", number)]

    assert struck("a") == struck("a") != struck("b")
    assert 10 < len(struck("a")) < 80


@pytest.mark.parametrize(
    "item",
    [
        *("explode@1", "fail_post", "fail_post@", "late@3", "fail_post@1:2", "fail_post@x", ""),
        *("rate=0", "rate=x", "rate=inf"),
    ],
)
def test_a_description_that_makes_no_sense_is_refused(item):
    with pytest.raises(InvalidRequestError):
        parse_faults([item])


def test_a_worker_takes_faults_only_when_they_are_allowed_by_name():
    required = ["--model=x", "--decodes=127.0.0.1:1"]
    assert resolve(PrefillConfig, required, {}).fault.parsed() is None
    with pytest.raises(ConfigError, match="--allow-faults"):
        resolve(PrefillConfig, [*required, "--faults=fail_post@3"], {}).fault.parsed()
    allowed = [*required, "--faults=fail_post@3,seed=1", "--allow-faults"]
    faults = resolve(PrefillConfig, allowed, {}).fault.parsed()
    assert faults is not None
    assert faults.fail_post == {3}
    with pytest.raises(ConfigError, match="explode"):
        resolve(
            PrefillConfig, [*required, "--faults=explode@1", "--allow-faults"], {}
        ).fault.parsed()


def test_a_segment_shorter_than_the_noise_is_changed_all_the_same():
    wire = Wire("local")
    wire.faults.corrupt.add(1)
    short = Segment(wire.source.address, 2), Segment(wire.target.address, 2)
    wire.writer.write(wire.name, [short[0]], [short[1]], b"x").result(10)
    assert bytes(wire.target.view(0, 2)) != b"\7\7"
    wire.close()
