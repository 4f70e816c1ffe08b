"""The other end of a transfer: an agent with one registered buffer, in this process or another."""

import abc
import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
import uuid
from pathlib import Path

from epd.transfer.agent import TransferAgent
from epd.transfer.base import AgentDescriptor, Segment
from epd.transfer.buffer import HostBuffer
from epd.transfer.factory import backend_opener
from epd.transfer.local_backend import LocalFabric

ROOT = Path(__file__).parents[2]


def open_agent(transport, name, fabric=None, config=None, wrap=None):
    """A started agent with a name of its own."""
    instance = uuid.uuid4().hex
    opener = backend_opener(transport, f"{name}.{instance}", instance, fabric=fabric)
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
    def notices(self, count, timeout_s=5.0): ...

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

    def notices(self, count, timeout_s=5.0):
        return self._inbox.take(count, timeout_s)

    def kill(self):
        self.agent.stop()


class ProcessPeer(Peer):
    """An agent in a process of its own, driven over its pipes."""

    def __init__(self, transport, byte_count):
        self.process = subprocess.Popen(
            [sys.executable, __file__, transport, str(byte_count)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
        )
        hello = json.loads(self.process.stdout.readline())
        hello["descriptor"]["metadata"] = bytes.fromhex(hello["descriptor"]["metadata"])
        self.descriptor = AgentDescriptor(**hello["descriptor"])
        self.base = Segment(*hello["base"])

    def _ask(self, *words):
        self.process.stdin.write(" ".join(map(str, words)) + "\n")
        self.process.stdin.flush()
        return json.loads(self.process.stdout.readline())

    def peek(self, offset, length):
        return bytes.fromhex(self._ask("peek", offset, length))

    def poke(self, offset, data):
        self._ask("poke", offset, data.hex())

    def notices(self, count, timeout_s=5.0):
        return [(name, bytes.fromhex(one)) for name, one in self._ask("notices", count, timeout_s)]

    def announce(self):
        """Makes the peer poll quickly, as it does while it expects transfers."""
        self._ask("announce")

    def hang(self):
        """The peer does nothing any more, its connections stay."""
        self.process.send_signal(signal.SIGSTOP)

    def go_on(self):
        """Ends :meth:`hang`."""
        self.process.send_signal(signal.SIGCONT)

    def kill(self):
        with contextlib.suppress(ProcessLookupError):
            self.process.send_signal(signal.SIGKILL)
        self.process.wait()
        self.process.stdin.close()
        self.process.stdout.close()


def serve(transport, byte_count):
    """Main of the peer process: one command a line, one JSON answer a line."""
    peer = ThreadPeer(transport, byte_count, None)
    descriptor = {**vars(peer.descriptor), "metadata": peer.descriptor.metadata.hex()}
    base = [peer.base.address, peer.base.length]
    print(json.dumps({"descriptor": descriptor, "base": base}), flush=True)
    for line in sys.stdin:
        command, *words = line.split()
        answer = None
        if command == "peek":
            answer = peer.peek(int(words[0]), int(words[1])).hex()
        elif command == "poke":
            peer.poke(int(words[0]), bytes.fromhex(words[1]))
        elif command == "announce":
            peer.agent.announce()
        elif command == "notices":
            answer = [(n, one.hex()) for n, one in peer.notices(int(words[0]), float(words[1]))]
        print(json.dumps(answer), flush=True)


def wait_until(condition, timeout_s=5.0):
    """Fails unless ``condition()`` becomes true in time."""
    end = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < end, "condition not met in time"
        time.sleep(0.002)


def local_fabric():
    return LocalFabric()


if __name__ == "__main__":
    serve(sys.argv[1], int(sys.argv[2]))
