"""The agent thread: order, bounds, and what survives which failure. The backend is scripted."""

import asyncio
import threading
import time

import numpy as np
import pytest

from epd.errors import InternalError, ResourceExhaustedError, TransferFailedError, UnavailableError
from epd.transfer.agent import TransferAgent
from epd.transfer.base import (
    AgentDescriptor,
    Capabilities,
    Segment,
    TransferBackend,
    TransferHandle,
    TransferResult,
    TransferState,
)
from epd.transfer.job import UnreleasedTransferError
from epd.transfer.order import TransferContent
from epd.transfer.pieces import cut
from epd.transfer.probe import measure_bandwidth
from epd.transfer.transfer_loop import AgentConfig
from tests.transfer.peers import Inbox, open_agent, wait_until


class Handle(TransferHandle):
    def __init__(self, length):
        self.length = length
        self.state = TransferState.RUNNING


class ScriptedBackend(TransferBackend):
    """Transfers end when the test says so."""

    name = "scripted"
    capabilities = Capabilities(True, False, True)

    def __init__(self):
        self.threads = set()
        self.posted = []
        self.arrived = []
        self.closed = False
        self.releases = True
        self.instant = False
        self.polls = 0
        self.crash = None

    def _note(self):
        self.threads.add(threading.current_thread())

    def register(self, segment, memory_kind):
        self._note()

    def descriptor(self):
        self._note()
        return AgentDescriptor("i", "scripted", self.name, b"")

    def add_peer(self, peer):
        self._note()

    def remove_peer(self, agent_name):
        raise KeyError("a bug in one call")

    def write(self, agent_name, local, remote, notice):
        self._note()
        handle = Handle(sum(one.length for one in local))
        if self.instant:
            handle.state = TransferState.DONE
        self.posted.append((agent_name, handle, notice))
        return handle

    read = write

    def poll(self, handle):
        self._note()
        return handle.state

    def finish(self, handle):
        return TransferResult(handle.length, 1, 1, 1)

    def release(self, handle):
        return self.releases

    def notices(self):
        self._note()
        self.polls += 1
        if self.crash:
            raise self.crash
        taken, self.arrived = self.arrived, []
        return taken

    def close(self):
        self._note()
        self.closed = True


@pytest.fixture
def backend():
    return ScriptedBackend()


@pytest.fixture
def start(backend):
    started = []

    def make(**config):
        agent = TransferAgent(lambda: backend, AgentConfig(**config))
        agent.start()
        started.append(agent)
        return agent

    yield make
    for agent in started:
        agent.stop(0.1)


def part(length, address=0):
    return [Segment(address, length)]


def finish(backend, index, state=TransferState.DONE):
    wait_until(lambda: len(backend.posted) > index)
    backend.posted[index][1].state = state


def test_pieces_cover_every_byte_once_and_respect_the_limit():
    generator = np.random.default_rng(0)
    lengths = [int(n) for n in generator.integers(1, 100, 50)]
    starts = np.cumsum([0, *lengths])
    local = [Segment(int(a), n) for a, n in zip(starts, lengths, strict=False)]
    remote = [Segment(10_000 + 2 * int(a), n) for a, n in zip(starts, lengths, strict=False)]
    seen = []
    for here, there in cut(local, remote, 64):
        assert 0 < sum(one.length for one in here) <= 64
        assert [one.length for one in here] == [one.length for one in there]
        seen += [one.address + step for one in here for step in range(one.length)]
    assert seen == list(range(sum(lengths)))


def test_the_backend_is_used_by_one_thread_only(start, backend):
    agent = start()
    agent.register(Segment(0, 1))
    agent.connect(agent.descriptor()).result(30)
    backend.instant = True
    agent.write("p", part(3), part(3)).result(30)
    agent.stop()
    assert backend.closed
    assert [thread.name for thread in backend.threads] == ["transfer-agent"]


def test_only_the_last_piece_carries_the_notice_and_waits_for_the_others(start, backend):
    done = start(piece_bytes=10).write("p", part(25), part(25), b"end")
    for index in range(3):
        finish(backend, index)
    assert done.result(30).byte_count == 25
    assert [notice for _, _, notice in backend.posted] == [b"", b"", b"end"]


def test_the_next_piece_is_not_posted_after_a_failed_one(start, backend):
    agent = start(piece_bytes=10)
    done = agent.write("p", part(25), part(25))
    finish(backend, 0, TransferState.FAILED)
    with pytest.raises(TransferFailedError):
        done.result(30)
    assert len(backend.posted) == 1
    assert (agent.counters.writes.failed, agent.counters.writes.byte_count) == (1, 0)


def test_guard_is_asked_before_every_post_and_can_forbid_it(start, backend):
    asked = []

    def guard():
        asked.append(len(backend.posted))
        if len(asked) == 2:
            raise TransferFailedError("lease is over")

    done = start(piece_bytes=10).write("p", part(25), part(25), guard=guard)
    finish(backend, 0)
    with pytest.raises(TransferFailedError, match="lease is over"):
        done.result(30)
    assert asked == [0, 1]
    assert len(backend.posted) == 1


@pytest.mark.parametrize("what", ["content", "segments", "guard"])
def test_a_bug_in_what_the_caller_gives_fails_that_transfer_only(start, backend, what, caplog):
    def bug():
        raise ValueError("not an EpdError")

    agent = start()
    huge = [Segment(1 << 63, 10)]
    contents = {"content": bug, "segments": lambda: TransferContent(huge, huge)}
    content = contents.get(what, lambda: TransferContent(part(10), part(10)))
    failed = agent.write_late("peer", content, bug if what == "guard" else None)
    with pytest.raises(InternalError, match="WRITE with peer cannot be posted"):
        failed.result(30)
    assert not backend.posted
    assert any(one.exc_info for one in caplog.records)
    assert agent.counters.writes.failed == 1
    following = agent.write("peer", part(10), part(10))
    finish(backend, 0)
    assert following.result(30).byte_count == 10
    assert agent.alive


def test_what_a_backend_raises_unforeseen_while_it_posts_ends_the_agent(start, backend):
    """It may have posted: nothing is known of the memory any more."""

    def write(*_):
        raise ValueError("not an EpdError")

    backend.write = write
    agent = start()
    with pytest.raises(InternalError, match="the transfer agent died"):
        agent.write("peer", part(10), part(10)).result(30)
    wait_until(lambda: not agent.alive)


def test_a_transfer_cancelled_before_its_post_is_never_posted(start, backend):
    agent = start(max_in_flight=1)
    agent.write("p", part(1), part(1))
    waiting = agent.write("p", part(2), part(2))
    wait_until(lambda: backend.posted)
    assert waiting.cancel()
    third = agent.write("p", part(3), part(3))
    finish(backend, 0)
    finish(backend, 1)
    assert third.result(30).byte_count == 3
    assert len(backend.posted) == 2


def test_no_more_than_the_limit_are_in_flight_with_one_peer(start, backend):
    agent = start(max_in_flight=2)
    done = [agent.write("p", part(1), part(1)) for _ in range(5)]
    done.append(agent.write("q", part(1), part(1)))  # others are not held up
    wait_until(lambda: len(backend.posted) == 3)
    time.sleep(0.02)
    assert [peer for peer, _, _ in backend.posted] == ["p", "p", "q"]
    for index in range(6):
        finish(backend, index)
    assert all(one.result(30) for one in done)


@pytest.fixture
def reconnecting(backend):
    """The calls that a new connection takes, and how many transfers had been posted by then."""
    calls = []
    backend.remove_peer = lambda name: calls.append(("remove", name, len(backend.posted)))
    backend.add_peer = lambda peer: calls.append(("add", peer.agent_name, len(backend.posted)))
    return calls


PEER = AgentDescriptor("i", "p", "scripted", b"")


def test_a_connection_is_made_anew_between_transfers_and_new_ones_wait_for_it(
    start, backend, reconnecting
):
    agent = start(reconnect_patience_s=3600)
    done = [agent.write("p", part(1), part(1))]
    wait_until(lambda: len(backend.posted) == 1)
    renewed = [agent.reconnect(PEER) for _ in range(3)]  # all who have failed ask
    done += [agent.write(name, part(1), part(1)) for name in "pq"]
    finish(backend, 1)  # others go on
    assert done[2].result(30)
    assert backend.posted[1][0] == "q"
    assert not reconnecting
    finish(backend, 0)
    for one in renewed:
        one.result(30)
    finish(backend, 2)
    assert all(one.result(30) for one in done)
    assert reconnecting == [("remove", "p", 2), ("add", "p", 2)]


def test_a_transfer_that_does_not_end_holds_a_new_connection_and_others_up_for_a_time_only(
    start, backend, reconnecting
):
    agent = start(reconnect_patience_s=0.05)
    agent.write("p", part(1), part(1))
    wait_until(lambda: backend.posted)
    renewed = agent.reconnect(PEER)
    following = agent.write("p", part(1), part(1))
    with pytest.raises(TransferFailedError, match="still run after"):
        renewed.result(30)
    finish(backend, 1)
    assert following.result(30)
    assert not reconnecting
    finish(backend, 0)
    agent.reconnect(PEER).result(30)
    assert len(reconnecting) == 2


def test_a_peer_that_is_disconnected_is_not_added_again_by_a_new_connection_under_way(
    start, backend, reconnecting
):
    agent = start(reconnect_patience_s=3600)
    agent.write("p", part(1), part(1))
    wait_until(lambda: backend.posted)
    renewed = agent.reconnect(PEER)
    agent.disconnect("p").result(30)
    with pytest.raises(UnavailableError, match="has gone"):
        renewed.result(30)
    finish(backend, 0)
    following = agent.write("p", part(1), part(1))
    finish(backend, 1)
    assert following.result(30)
    assert reconnecting == [("remove", "p", 1)]


def test_a_connection_that_is_refused_is_told_and_the_agent_lives_on(start, backend, reconnecting):
    def refuse(peer):
        raise TransferFailedError("refused")

    backend.add_peer = refuse
    agent = start()
    with pytest.raises(TransferFailedError, match="refused"):
        agent.reconnect(PEER).result(30)
    assert agent.alive
    agent.stop()
    with pytest.raises(UnavailableError, match="stopped"):
        agent.reconnect(PEER).result(30)


def test_open_transfers_are_bounded(start):
    agent = start(max_open=2)
    done = [agent.write("p", part(1), part(1)) for _ in range(3)]
    with pytest.raises(ResourceExhaustedError):
        done[2].result(30)
    assert not done[0].done()


def test_a_handle_the_library_keeps_is_told_and_released_later(start, backend):
    backend.releases = False
    agent = start(release_patience_s=0.05)
    done = agent.write("p", part(1), part(1))
    finish(backend, 0, TransferState.FAILED)
    with pytest.raises(UnreleasedTransferError) as caught:
        done.result(30)
    assert not caught.value.released.done()
    backend.releases = True
    caught.value.released.result(30)


def test_an_exception_of_a_subscriber_is_counted_and_survived(start, backend):
    agent = start()
    inbox = Inbox()
    agent.subscribe(lambda batch: 1 / 0)
    agent.subscribe(inbox)
    backend.arrived = [("p", b"one")]
    assert inbox.take(1, 30) == [("p", b"one")]
    assert agent.counters.callback_errors == 1
    assert agent.alive


def test_a_bug_in_one_call_fails_that_call_only(start):
    agent = start()
    with pytest.raises(KeyError):
        agent.disconnect("p").result(30)
    assert agent.alive


def test_death_of_the_thread_fails_everything_open_and_is_told(start, backend):
    agent = start(max_in_flight=1)
    causes: list[BaseException] = []
    agent.on_death(causes.append)
    running = agent.write("p", part(1), part(1))
    queued = agent.write("p", part(1), part(1))
    wait_until(lambda: backend.posted)
    backend.crash = RuntimeError("boom")
    with pytest.raises(UnreleasedTransferError, match="died"):  # nobody knows whether it runs
        running.result(30)
    with pytest.raises(Exception, match="boom"):
        queued.result(30)
    wait_until(lambda: causes)
    assert isinstance(causes[0], RuntimeError)
    assert not agent.alive
    with pytest.raises(Exception, match="boom"):
        agent.write("p", part(1), part(1)).result(30)
    with pytest.raises(Exception, match="boom"):
        agent.connect(AgentDescriptor("i", "q", "scripted", b"")).result(30)


def test_a_backend_that_cannot_be_opened_is_an_error_at_start():
    def fail():
        raise UnavailableError("no such library")

    with pytest.raises(UnavailableError, match="no such library"):
        TransferAgent(fail).start()


def test_stop_posts_nothing_new_and_waits_for_what_runs(start, backend):
    agent = start(max_in_flight=1)
    running = agent.write("p", part(1), part(1))
    queued = agent.write("p", part(1), part(1))
    wait_until(lambda: backend.posted)
    stopping = threading.Thread(target=agent.stop, args=(60,))
    stopping.start()
    wait_until(lambda: agent._loop.stop_by is not None)
    time.sleep(0.02)
    finish(backend, 0)
    assert running.result(30).byte_count == 1
    with pytest.raises(UnavailableError, match="stopped"):
        queued.result(30)
    stopping.join(60)
    assert backend.closed


def test_it_polls_quickly_only_while_something_is_due(start, backend):
    agent = start(poll_s=0.001, idle_poll_s=0.2)

    def seldom():
        time.sleep(0.05)
        before, began = backend.polls, time.monotonic()
        time.sleep(0.3)
        # This thread may have slept for longer.
        return backend.polls - before <= (time.monotonic() - began) / 0.2 + 2

    assert seldom()
    before = backend.polls
    agent.announce()
    wait_until(lambda: backend.polls - before > 20)
    agent.withdraw()
    assert seldom()


async def test_the_probe_reads_and_never_writes(agent, buffer, peer):
    await asyncio.wrap_future(agent.connect(peer.descriptor))
    report = await measure_bandwidth(
        agent, peer.descriptor.agent_name, buffer.part(0, 4 << 20), peer.at(0, 4 << 20)
    )
    assert report.bytes_per_s > 0
    assert report.first_ns > 0
    assert agent.counters.reads.done == 4
    assert agent.counters.writes.done == 0


def test_nothing_announced_costs_less_than_a_twentieth_of_a_core():
    """CPU time of the real library's thread, which other processes do not change."""
    agent = open_agent("nixl", "idle")
    try:
        clock = time.pthread_getcpuclockid(agent._thread.ident)
        time.sleep(0.5)
        used, began = time.clock_gettime(clock), time.monotonic()
        time.sleep(2.0)
        share = (time.clock_gettime(clock) - used) / (time.monotonic() - began)
        assert share < 0.05
    finally:
        agent.stop()
