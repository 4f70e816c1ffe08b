"""The other end of a transfer: an agent with one registered buffer, in this process or another."""

import abc
import contextlib
import functools
import multiprocessing
import os
import signal
import threading
import time
import uuid

from epd.transfer.agent import TransferAgent
from epd.transfer.base import AgentDescriptor, ReceivePlan, Segment
from epd.transfer.buffer import HostBuffer
from epd.transfer.factory import TransportOptions, backend_opener
from epd.transfer.local_backend import LocalFabric


def open_agent(transport, name, fabric=None, config=None, wrap=None):
    """A started agent with a name of its own."""
    instance = uuid.uuid4().hex
    options = TransportOptions(fabric=fabric)
    opener = backend_opener(transport.split(","), f"{name}.{instance}", instance, options)
    agent = TransferAgent((lambda: wrap(opener())) if wrap else opener, config)
    agent.start()
    return agent


class Peer(abc.ABC):
    """What a test needs of the other end."""

    descriptor: AgentDescriptor
    base: Segment

    def at(self, offset, length):
        assert offset + length <= self.base.length
        return Segment(self.base.address + offset, length)

    @abc.abstractmethod
    def peek(self, offset, length): ...

    @abc.abstractmethod
    def poke(self, offset, data): ...

    @abc.abstractmethod
    def expect(self, plan_id, agent_name, offset, length):
        """Lets an agent WRITE there, as a reservation does."""

    @abc.abstractmethod
    def forget(self, plan_id):
        """Ends that."""

    @abc.abstractmethod
    def notices(self, count, timeout_s=60.0): ...

    @abc.abstractmethod
    def kill(self): ...


class Inbox:
    """Notices in order of arrival."""

    def __init__(self):
        self._arrived = []
        self._changed = threading.Condition()

    def __call__(self, batch):
        with self._changed:
            self._arrived.extend(batch)
            self._changed.notify_all()

    def take(self, count, timeout_s):
        with self._changed:
            self._changed.wait_for(lambda: len(self._arrived) >= count, timeout_s)
            taken, self._arrived = self._arrived, []
            return taken


class ThreadPeer(Peer):
    """An agent in this process."""

    def __init__(self, transport, byte_count, fabric):
        self._buffer = HostBuffer(byte_count)
        self._inbox = Inbox()
        self.agent = open_agent(transport, "peer", fabric)
        self.agent.subscribe(self._inbox)
        self.agent.register(self._buffer.segment)
        self.descriptor = self.agent.descriptor()
        self.base = self._buffer.segment

    def peek(self, offset, length):
        return self._buffer.view(offset, length).tobytes()

    def poke(self, offset, data):
        self._buffer.view(offset, len(data))[:] = list(data)

    def expect(self, plan_id, agent_name, offset, length):
        plan = ReceivePlan(plan_id, agent_name, [self.at(offset, length)])
        self.agent.expect(plan).result(30)

    def forget(self, plan_id):
        self.agent.forget(plan_id).result(30)

    def notices(self, count, timeout_s=30.0):
        return self._inbox.take(count, timeout_s)

    def announce(self):
        self.agent.announce()

    def kill(self):
        self.agent.stop()


class ProcessPeer(Peer):
    """An agent in a process of its own, driven over a pipe."""

    def __init__(self, transport, byte_count):
        self._pipe, theirs = _forks().Pipe()
        self.process = _forks().Process(target=serve, args=(transport, byte_count, theirs))
        self.process.daemon = True
        self.process.start()
        theirs.close()
        self.descriptor, self.base = self._pipe.recv()

    def _ask(self, method, *arguments):
        self._pipe.send((method, *arguments))
        return self._pipe.recv()

    def peek(self, offset, length):
        return self._ask("peek", offset, length)

    def poke(self, offset, data):
        self._ask("poke", offset, data)

    def expect(self, plan_id, agent_name, offset, length):
        self._ask("expect", plan_id, agent_name, offset, length)

    def forget(self, plan_id):
        self._ask("forget", plan_id)

    def notices(self, count, timeout_s=60.0):
        return self._ask("notices", count, timeout_s)

    def announce(self):
        """Makes the peer poll quickly, as it does while it expects transfers."""
        self._ask("announce")

    def hang(self):
        """The peer does nothing any more, its connections stay."""
        os.kill(self.process.pid, signal.SIGSTOP)

    def go_on(self):
        """Ends :meth:`hang`."""
        os.kill(self.process.pid, signal.SIGCONT)

    def kill(self):
        self.process.kill()
        self.process.join()
        self._pipe.close()


@functools.cache
def _forks():
    """Peers fork from one process that has imported everything and runs nothing: importing torch
    takes longer than most tests.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.transfer.peers", "epd.transfer.collective_backend"])
    return context


def serve(transport, byte_count, pipe):
    """Main of the peer process: a method of the peer and its arguments, one answer."""
    peer = ThreadPeer(transport, byte_count, None)
    pipe.send((peer.descriptor, peer.base))
    with contextlib.suppress(EOFError):
        while True:
            method, *arguments = pipe.recv()
            pipe.send(getattr(peer, method)(*arguments))


def wait_until(condition, timeout_s=60.0):
    """Fails unless ``condition()`` becomes true in time."""
    end = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < end, "condition not met in time"
        time.sleep(0.002)


def local_fabric():
    return LocalFabric()
