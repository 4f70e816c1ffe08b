"""What every transport must do, seen through the transfer agent."""

import time

import numpy as np
import pytest

from epd.errors import TransferFailedError
from epd.transfer.base import Segment
from tests.transfer.peers import ProcessPeer

WAIT = 60


def fill(buffer, seed=0):
    buffer.view()[:] = np.random.default_rng(seed).integers(
        0, 256, len(buffer.view()), dtype=np.uint8
    )


def test_write_puts_the_bytes_into_the_peer(agent, buffer, peer):
    fill(buffer)
    agent.connect(peer.descriptor).result(WAIT)
    result = agent.write(
        peer.descriptor.agent_name, [buffer.part(64, 5000)], [peer.at(300, 5000)]
    ).result(WAIT)
    assert peer.peek(300, 5000) == buffer.view(64, 5000).tobytes()
    assert peer.peek(0, 300) == bytes(300)
    assert result.byte_count == 5000
    assert agent.counters.writes.byte_count == 5000
    assert agent.counters.writes.done == 1


def test_read_gets_the_bytes_of_the_peer(agent, buffer, peer):
    agent.connect(peer.descriptor).result(WAIT)
    peer.poke(1000, b"embedding")
    result = agent.read(peer.descriptor.agent_name, [buffer.part(8, 9)], [peer.at(1000, 9)]).result(
        WAIT
    )
    assert buffer.view(8, 9).tobytes() == b"embedding"
    assert result.byte_count == 9
    assert agent.counters.reads.byte_count == 9


def test_notice_names_the_sender_and_comes_after_all_data(agent, buffer, peer):
    """17 MiB are cut into three pieces; the notice must follow the last one."""
    fill(buffer)
    size = 17 << 20
    agent.connect(peer.descriptor).result(WAIT)
    done = agent.write(
        peer.descriptor.agent_name, [buffer.part(0, size)], [peer.at(0, size)], b"all there"
    )
    me = agent.descriptor().agent_name
    assert peer.notices(1) == [(me, b"all there")]
    assert peer.peek(size - 4096, 4096) == buffer.view(size - 4096, 4096).tobytes()
    assert done.result(WAIT).byte_count == size


def test_scattered_blocks_land_where_they_belong(agent, buffer, peer):
    fill(buffer)
    block = 4096
    order = np.random.default_rng(1).permutation(200)
    agent.connect(peer.descriptor).result(WAIT)
    agent.write(
        peer.descriptor.agent_name,
        [buffer.part(2 * index * block, block) for index in range(200)],
        [peer.at(3 * int(to) * block, block) for to in order],
    ).result(WAIT)
    for index in (0, 1, 77, 199):
        here = buffer.view(2 * index * block, block).tobytes()
        assert peer.peek(3 * int(order[index]) * block, block) == here
    assert agent.counters.writes.byte_count == 200 * block


def test_a_peer_can_be_left_and_connected_again(agent, buffer, peer):
    for _ in range(3):
        agent.connect(peer.descriptor).result(WAIT)
        agent.write(
            peer.descriptor.agent_name, [buffer.part(0, 9)], [peer.at(0, 9)], b"again"
        ).result(WAIT)
        assert [notice for _, notice in peer.notices(1)] == [b"again"]
        agent.disconnect(peer.descriptor.agent_name).result(WAIT)


@pytest.mark.parametrize(
    ("local", "remote"), [([10], [11]), ([10, 10], [10]), ([], [])], ids=["length", "count", "none"]
)
def test_lists_that_do_not_pair_up_are_refused(agent, buffer, peer, local, remote):
    agent.connect(peer.descriptor).result(WAIT)
    refused = agent.write(
        peer.descriptor.agent_name,
        [buffer.part(0, n) for n in local],
        [peer.at(0, n) for n in remote],
    )
    with pytest.raises(TransferFailedError):
        refused.result(WAIT)


def test_unknown_peer_is_refused(agent, buffer, peer):
    refused = agent.write("nobody", [buffer.part(0, 8)], [peer.at(0, 8)])
    with pytest.raises(TransferFailedError, match="nobody"):
        refused.result(WAIT)
    assert agent.alive


@pytest.mark.parametrize("side", ["local", "remote"])
def test_unregistered_memory_is_refused(agent, buffer, peer, side):
    agent.connect(peer.descriptor).result(WAIT)
    local, remote = buffer.part(0, 4096), peer.at(0, 4096)
    if side == "local":
        local = Segment(np.zeros(8192, np.uint8).ctypes.data, 4096)
    else:
        remote = Segment(peer.base.address + peer.base.length + (64 << 20), 4096)
    with pytest.raises(TransferFailedError):
        agent.write(peer.descriptor.agent_name, [local], [remote]).result(WAIT)
    assert agent.alive


def test_a_killed_peer_fails_the_next_transfer_and_only_that(agent, buffer, make_peer):
    dead, living = make_peer(), make_peer()
    for one in (dead, living):
        agent.connect(one.descriptor).result(WAIT)
        agent.write(one.descriptor.agent_name, [buffer.part(0, 64)], [one.at(0, 64)]).result(WAIT)
    dead.kill()
    for _ in range(2):
        doomed = agent.write(dead.descriptor.agent_name, [buffer.part(0, 64)], [dead.at(0, 64)])
        with pytest.raises(TransferFailedError):
            doomed.result(WAIT)
    agent.disconnect(dead.descriptor.agent_name).result(WAIT)
    agent.write(
        living.descriptor.agent_name, [buffer.part(0, 64)], [living.at(0, 64)], b"alive"
    ).result(WAIT)
    assert [notice for _, notice in living.notices(1)] == [b"alive"]
    assert agent.counters.writes.failed == 2


def test_a_transfer_with_a_hung_peer_does_not_fail_and_its_notice_arrives_later(
    agent, buffer, peer
):
    if not isinstance(peer, ProcessPeer):
        pytest.skip("a process of its own is needed to hang")
    agent.connect(peer.descriptor).result(WAIT)
    agent.write(peer.descriptor.agent_name, [buffer.part(0, 9)], [peer.at(0, 9)]).result(WAIT)
    peer.hang()
    done = agent.write(peer.descriptor.agent_name, [buffer.part(0, 9)], [peer.at(0, 9)], b"late")
    time.sleep(0.3)
    assert not done.done() or done.exception() is None
    peer.go_on()
    assert done.result(WAIT).byte_count == 9
    assert [notice for _, notice in peer.notices(1)] == [b"late"]


def test_transfers_with_a_hung_peer_hold_up_no_other(agent, buffer, make_peer, transport):
    hung, living = make_peer(), make_peer()
    if not isinstance(hung, ProcessPeer):
        pytest.skip("a process of its own is needed to hang")
    size = 1 << 20
    for one in (hung, living):
        agent.connect(one.descriptor).result(WAIT)
        agent.write(one.descriptor.agent_name, [buffer.part(0, 9)], [one.at(0, 9)]).result(WAIT)
    hung.hang()
    waiting = [
        agent.write(hung.descriptor.agent_name, [buffer.part(0, size)], [hung.at(0, size)])
        for _ in range(2 * agent.config.max_in_flight)
    ]
    agent.write(
        living.descriptor.agent_name, [buffer.part(0, size)], [living.at(0, size)], b"alive"
    ).result(WAIT)
    assert [notice for _, notice in living.notices(1)] == [b"alive"]
    copied = list(agent.carriers().get(transport, ())) == ["shm"]  # without the peer's help
    assert copied or not all(one.done() for one in waiting)
    hung.go_on()
    assert all(one.result(WAIT).byte_count == size for one in waiting)


def test_a_peer_restarted_five_times_is_reached_again_each_time(agent, buffer, make_peer):
    fill(buffer)
    for generation in range(6):
        peer = make_peer()
        agent.connect(peer.descriptor).result(WAIT)
        agent.write(
            peer.descriptor.agent_name,
            [buffer.part(generation * 100, 100)],
            [peer.at(0, 100)],
            b"%d" % generation,
        ).result(WAIT)
        assert [notice for _, notice in peer.notices(1)] == [b"%d" % generation]
        assert peer.peek(0, 100) == buffer.view(generation * 100, 100).tobytes()
        peer.kill()
        agent.disconnect(peer.descriptor.agent_name).result(WAIT)


def test_a_hundred_transfers_all_arrive_and_each_notice_follows_its_data(agent, buffer, peer):
    fill(buffer)
    size = 64 << 10
    agent.connect(peer.descriptor).result(WAIT)
    done = [
        agent.write(
            peer.descriptor.agent_name,
            [buffer.part(n * size, size)],
            [peer.at(n * size, size)],
            b"piece %d" % n,
        )
        for n in range(100)
    ]
    arrived: list[bytes] = []
    while len(arrived) < 100:
        batch = peer.notices(1)
        assert batch
        arrived += [notice for _, notice in batch]
        last = int(arrived[-1].split()[1])
        assert peer.peek(last * size, 512) == buffer.view(last * size, 512).tobytes()
    assert sorted(arrived) == sorted(b"piece %d" % n for n in range(100))
    assert sum(one.result(WAIT).byte_count for one in done) == 100 * size


def test_transfers_that_wait_for_a_peer_that_is_left_end_with_those_that_run(
    agent, buffer, make_peer
):
    """Not each when its own time is up: the memory they hold is needed."""
    peer = make_peer()
    if not isinstance(peer, ProcessPeer):
        pytest.skip("a process of its own is needed to die")
    agent.connect(peer.descriptor).result(WAIT)
    agent.write(peer.descriptor.agent_name, [buffer.part(0, 9)], [peer.at(0, 9)]).result(WAIT)
    peer.hang()
    waiting = [
        agent.write(peer.descriptor.agent_name, [buffer.part(0, 1 << 20)], [peer.at(0, 1 << 20)])
        for _ in range(40)
    ]
    time.sleep(0.1)
    peer.kill()
    agent.disconnect(peer.descriptor.agent_name).result(WAIT)
    began = time.monotonic()
    ends = [one.exception(WAIT) for one in waiting]
    assert all(end is None or isinstance(end, TransferFailedError) for end in ends)
    assert time.monotonic() - began < 15
