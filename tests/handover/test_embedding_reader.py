"""Embeddings are fetched all or none, leases end truthfully, and no memory is given back early."""

import asyncio
import dataclasses
from types import SimpleNamespace

import pytest

from epd.errors import (
    InvalidRequestError,
    NotFoundError,
    ResourceExhaustedError,
    TransferFailedError,
    UnavailableError,
)
from epd.handover import encoder_leases
from epd.handover.embedding_memory import EmbeddingMemory
from epd.handover.embedding_reader import EmbeddingReader
from epd.transfer.base import Segment
from epd.transfer.faults import Faults
from tests.handover.encoders import WIDTH, Encoder
from tests.handover.sides import eventually
from tests.transfer.held import HELD, HeldBackend
from tests.transfer.peers import open_agent

ROW = WIDTH * 4


class Reader:
    """A reader with its agent and memory."""

    def __init__(self, transport, fabric, encoders, rows=256, wait_timeout_s=60, max_waiting=64):
        self.faults = Faults()

        def faulty(inner):
            self.backend = HeldBackend(inner, self.faults)
            return self.backend

        self.agent = open_agent(transport, "prefill", fabric, None, faulty)
        self.memory = EmbeddingMemory(rows * ROW, max_waiting, wait_timeout_s)
        self.agent.register(self.memory.segment)
        controls = {encoder.address: encoder for encoder in encoders}
        self.reader = EmbeddingReader(
            self.agent, self.memory, controls.__getitem__, control_timeout_s=60
        )

    async def fetch(self, handles):
        async with self.reader.read(handles) as (embeddings, report):
            return [one.data.tobytes() for one in embeddings], report

    async def idle(self):
        await eventually(lambda: not self.memory.used_bytes and not self.memory.quarantined_bytes)
        self.memory.check_integrity()


@pytest.fixture
def encoder(transport, fabric):
    encoder = Encoder(transport, fabric)
    yield encoder
    encoder.agent.stop()


@pytest.fixture
def make_reader(transport, fabric, encoder):
    made = []

    def make(encoders=(), **options):
        made.append(Reader(transport, fabric, [encoder, *encoders], **options))
        return made[-1]

    yield make
    for one in made:
        one.agent.stop()


async def test_embeddings_arrive_in_order_with_shape_and_address(make_reader, encoder):
    reader = make_reader()
    handles = [encoder.handle(10), encoder.handle(64, pieces=4), encoder.handle(1)]
    async with reader.reader.read(handles) as (embeddings, report):
        for handle, one in zip(handles, embeddings, strict=True):
            assert one.data.tobytes() == encoder.content(handle)
            assert one.address == one.data.ctypes.data
            assert (one.shape, one.dtype) == (handle.shape, "float32")
        assert report.byte_count == 75 * ROW
        assert reader.memory.used_bytes
        await eventually(lambda: encoder.released)
        assert encoder.last_words == [True]
    await reader.idle()
    assert encoder.renewals >= 1


async def test_no_images_need_no_encoder(make_reader):
    data, report = await make_reader().fetch([])
    assert data == []
    assert report.byte_count == 0


async def test_images_of_several_encoders(transport, fabric, make_reader, encoder):
    other = Encoder(transport, fabric, "encoder:2")
    reader = make_reader([other])
    handles = [encoder.handle(4), other.handle(5), encoder.handle(6)]
    data, _ = await reader.fetch(handles)
    assert data == [
        encoder.content(handles[0]),
        other.content(handles[1]),
        encoder.content(handles[2]),
    ]
    await eventually(lambda: encoder.released and other.released)
    other.agent.stop()


async def test_all_images_of_a_request_or_none(make_reader, encoder):
    """F26: four requests of two images each, room for three images; nobody waits for ever."""
    reader = make_reader(rows=96)

    async def request():
        async with reader.reader.read([encoder.handle(32), encoder.handle(32)]):
            await asyncio.sleep(0.05)

    async with asyncio.timeout(20):
        await asyncio.gather(*(request() for _ in range(4)))
    await reader.idle()


async def test_a_request_that_never_fits_is_refused_at_once(make_reader, encoder):
    reader = make_reader(rows=16)
    with pytest.raises(InvalidRequestError, match="in all"):
        async with asyncio.timeout(20):
            await reader.fetch([encoder.handle(17)])
    await eventually(lambda: encoder.last_words == [True])


async def test_waiting_for_room_is_bounded_in_time_and_number(make_reader, encoder):
    reader = make_reader(rows=32, wait_timeout_s=1.0, max_waiting=1)
    async with reader.reader.read([encoder.handle(32)]):
        waiting = asyncio.create_task(reader.fetch([encoder.handle(32)]))
        await eventually(lambda: reader.memory.waiting == 1)
        with pytest.raises(ResourceExhaustedError, match="limit is 1"):
            await reader.fetch([encoder.handle(32)])
        with pytest.raises(ResourceExhaustedError, match="no embedding memory"):
            await waiting
    await reader.idle()


async def test_leases_are_renewed_while_waiting_for_room(make_reader, encoder, monkeypatch):
    # A lease so short would lapse whenever this machine stands still for a moment.
    monkeypatch.setattr(encoder_leases, "time", SimpleNamespace(monotonic=lambda: 0.0))
    reader = make_reader(rows=32)
    async with reader.reader.read([encoder.handle(32)]):
        waiting = asyncio.create_task(reader.fetch([encoder.handle(32, lease_s=0.15)]))
        await eventually(lambda: encoder.renewals > 5)
    await waiting
    await reader.idle()


async def test_failed_read_names_hop_and_image_and_releases_settled(make_reader, encoder):
    reader = make_reader()
    reader.faults.fail_read.add(2)
    with pytest.raises(TransferFailedError, match="from encoder encoder:1, image 1: forced"):
        await reader.fetch([encoder.handle(4), encoder.handle(4)])
    await eventually(lambda: True in encoder.last_words)
    await reader.idle()
    data, _ = await reader.fetch([encoder.handle(4)])  # through a new connection
    assert len(data) == 1


async def test_memory_is_kept_while_a_read_of_a_failed_request_runs(make_reader, encoder):
    reader = make_reader()
    reader.faults.delay_read[1] = HELD
    reader.faults.fail_read.add(2)
    with pytest.raises(TransferFailedError, match="image 1"):
        await reader.fetch([encoder.handle(4), encoder.handle(4)])
    assert reader.memory.quarantined_bytes
    await eventually(lambda: encoder.last_words == [False])
    reader.backend.let_go()
    await eventually(lambda: encoder.last_words == [False, True])
    await reader.idle()


async def test_memory_is_kept_while_a_read_of_a_cancelled_request_runs(make_reader, encoder):
    """F12."""
    reader = make_reader()
    reader.faults.delay_read[1] = HELD
    reading = asyncio.create_task(reader.fetch([encoder.handle(4)]))
    await eventually(lambda: reader.faults.reads)
    reading.cancel()
    with pytest.raises(asyncio.CancelledError):
        await reading
    assert reader.memory.quarantined_bytes
    await eventually(lambda: encoder.last_words == [False])
    reader.backend.let_go()
    await eventually(lambda: encoder.last_words == [False, True])
    await reader.idle()


async def test_cancel_while_waiting_for_room_takes_nothing(make_reader, encoder):
    reader = make_reader(rows=32)
    async with reader.reader.read([encoder.handle(32)]):
        waiting = asyncio.create_task(reader.fetch([encoder.handle(32)]))
        await eventually(lambda: reader.memory.waiting == 1)
        waiting.cancel()
        await asyncio.wait({waiting})
        assert reader.memory.waiting == 0
    await reader.idle()


@pytest.mark.parametrize("renewal_takes_s", [0.0, 0.2])
async def test_handle_the_encoder_does_not_know_is_not_found(make_reader, encoder, renewal_takes_s):
    """F05, F08: its memory may hold another image by now, so what was read does not count, even
    when the READ is done before the encoder answers.
    """
    reader = make_reader()
    encoder.renewal_takes_s = renewal_takes_s
    handle = encoder.handle(4)
    encoder.known.clear()
    with pytest.raises(NotFoundError, match="does not know"):
        await reader.fetch([handle])
    await reader.idle()


async def test_lease_that_lapses_during_the_read_is_not_found(make_reader, encoder):
    reader = make_reader()
    reader.faults.delay_read[1] = 2.0
    handle = encoder.handle(4, lease_s=0.5)
    reading = asyncio.create_task(reader.fetch([handle]))
    await eventually(lambda: encoder.renewals and reader.faults.reads)
    encoder.known.clear()
    with pytest.raises(NotFoundError):
        await reading
    await reader.idle()


async def test_dead_encoder_fails_at_once(make_reader, encoder):
    reader = make_reader()
    await reader.fetch([encoder.handle(4)])
    handle = encoder.handle(4)
    encoder.die()
    with pytest.raises((UnavailableError, TransferFailedError)):
        async with asyncio.timeout(20):
            await reader.fetch([handle])
    await reader.idle()


async def test_encoder_restarted_at_its_address_is_read_again(
    transport, fabric, make_reader, encoder
):
    reader = make_reader()
    await reader.fetch([encoder.handle(4)])
    encoder.agent.stop()
    for _ in range(5):
        again = Encoder(transport, fabric)
        reader.reader._control = {again.address: again}.__getitem__
        handle = again.handle(8)
        data, _ = await reader.fetch([handle])
        assert data == [again.content(handle)]
        again.agent.stop()
    assert len(reader.reader._peers) == 1


@pytest.mark.parametrize(
    "change", [{"byte_count": 1}, {"shape": (3, WIDTH)}, {"dtype": "int3"}, {"segments": ()}]
)
async def test_a_handle_that_contradicts_itself_is_refused(make_reader, encoder, change):
    handle = dataclasses.replace(encoder.handle(4), **change)
    with pytest.raises(InvalidRequestError) as caught:
        await make_reader().fetch([handle])
    assert caught.value.field.startswith("images[0].handle")


async def test_peers_beyond_the_limit_are_forgotten(transport, fabric, make_reader):
    """F24."""
    others = [Encoder(transport, fabric, f"encoder:{n}") for n in range(6)]
    reader = make_reader(others)
    reader.reader._peers._limit = 3
    for other in others:
        await reader.fetch([other.handle(4)])
        assert len(reader.reader._peers) <= 3
    await reader.fetch([others[0].handle(4)])
    for other in others:
        other.agent.stop()


class Late:
    """Reads with images that are not encoded yet, and what came of it."""

    def __init__(self, reader, encoder, count):
        self.encoder = encoder
        self.reader = reader
        self.handles = [encoder.handle(4 + n) for n in range(count)]
        self.encoded = {}
        for handle in self.handles[1:]:
            self.encoded[handle.handle_id] = asyncio.get_running_loop().create_future()
            encoder.encoding[handle.handle_id] = self.encoded[handle.handle_id]
        self.arrived = []
        self.entered = asyncio.Event()
        self.done = asyncio.Event()
        self.seen = []

    def finish(self, position, error=None):
        future = self.encoded[self.handles[position].handle_id]
        future.set_exception(error) if error else future.set_result(None)

    async def run(self):
        late = range(1, len(self.handles))
        reading = self.reader.reader.read(
            self.handles, late, lambda n, report: self.arrived.append(n)
        )
        async with reading as (embeddings, report):
            assert report.byte_count == self.handles[0].byte_count
            self.entered.set()
            await self.done.wait()
            self.seen = [one.data.tobytes() for one in embeddings]


async def test_late_images_are_read_as_they_get_ready(make_reader, encoder):
    reader = make_reader()
    late = Late(reader, encoder, 3)
    task = asyncio.create_task(late.run())
    late.finish(2)
    await eventually(lambda: late.arrived == [2])
    assert not encoder.released
    late.finish(1)
    await eventually(lambda: late.arrived == [2, 1])
    late.done.set()
    await task
    assert late.seen == [encoder.content(handle) for handle in late.handles]
    await eventually(lambda: encoder.last_words == [True])
    await reader.idle()


async def test_an_image_that_fails_late_cancels_the_body_and_frees_everything(make_reader, encoder):
    reader = make_reader()
    late = Late(reader, encoder, 3)
    task = asyncio.create_task(late.run())
    late.finish(2)
    await eventually(lambda: late.arrived == [2])
    late.finish(1, InvalidRequestError("the image is broken", field="image"))
    with pytest.raises(InvalidRequestError, match="broken"):
        await task
    await eventually(lambda: encoder.last_words == [True])
    await reader.idle()


@pytest.mark.parametrize("end", ["cancelled", "not needed"])
async def test_a_body_that_ends_before_late_images_frees_everything(make_reader, encoder, end):
    reader = make_reader()
    late = Late(reader, encoder, 3)
    task = asyncio.create_task(late.run())
    await late.entered.wait()
    if end == "cancelled":
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
    else:
        late.done.set()
        await task
    await eventually(lambda: encoder.last_words == [True])
    await reader.idle()


async def test_memory_is_kept_while_a_late_read_of_a_cancelled_request_runs(make_reader, encoder):
    reader = make_reader()
    reader.faults.delay_read = {2: HELD}
    late = Late(reader, encoder, 2)
    task = asyncio.create_task(late.run())
    late.finish(1)
    await eventually(lambda: reader.faults.reads == 2)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert reader.memory.quarantined_bytes
    await eventually(lambda: encoder.last_words == [False])
    reader.backend.let_go()
    await eventually(lambda: encoder.last_words == [False, True])
    await reader.idle()


@pytest.mark.parametrize("beyond", [0, 1 << 40])
async def test_a_handle_to_memory_the_encoder_does_not_offer_is_the_callers_mistake(
    make_reader, encoder, beyond
):
    """The memory is named, nothing is read, and the next request finds the connection as it was."""
    reader = make_reader()
    await reader.fetch([encoder.handle(4)])
    good = encoder.handle(4)
    outside = encoder.memory.address + len(encoder.memory.view()) - ROW + beyond
    bad = dataclasses.replace(good, segments=(Segment(outside, good.byte_count),))
    connects = []
    connect = reader.agent.connect

    def counted_connect(peer):
        connects.append(peer)
        return connect(peer)

    reader.agent.connect = counted_connect
    with pytest.raises(InvalidRequestError) as raised:
        await reader.fetch([good, bad])
    assert raised.value.field == "images[1].handle.segments"
    encoder.known.discard(bad.handle_id)  # a handle that is not known (any more) explains more
    with pytest.raises(NotFoundError):
        await reader.fetch([bad])
    await reader.fetch([encoder.handle(4)])
    assert not connects
    await reader.idle()


@pytest.mark.parametrize("outside", [1 << 63, (1 << 64) - 4 * ROW, (1 << 63) - ROW])
async def test_a_handle_to_memory_that_no_process_has_is_refused_and_kills_no_agent(
    make_reader, encoder, outside
):
    """An address has 64 bits on the wire, and rows of segments have 63."""
    reader = make_reader()
    bad = encoder.handle(4)
    bad = dataclasses.replace(bad, segments=(Segment(outside, bad.byte_count),))
    with pytest.raises(InvalidRequestError) as raised:
        await reader.fetch([bad])
    assert raised.value.field == "images[0].handle.segments"
    assert reader.agent.alive
    await reader.fetch([encoder.handle(4)])
    await reader.idle()
