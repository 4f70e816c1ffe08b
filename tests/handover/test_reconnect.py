"""A connection that has broken is made anew, also when there is always somebody who uses it."""

import asyncio
import contextlib
import os
import socket
import threading
from pathlib import Path

import pytest

from epd.errors import EpdError, TransferFailedError
from tests.handover.sides import eventually
from tests.support.over_tcp import ENVIRONMENT, pass_over_tcp

#: Set for the process of the last test: real connections, really cut.
OVER_TCP = os.environ.items() >= ENVIRONMENT.items()
#: So many pushes may fail for a broken connection: those that had begun, and some to spare.
MOST_FAILED = 6


def break_connection(pair):
    """From now on no WRITE can be posted until the peer is added again."""
    if OVER_TCP:
        cut_tcp()
        return
    backend = pair.prefill.backend
    write, remove_peer = backend.write, backend.remove_peer

    def refuse(agent_name, *_):
        raise TransferFailedError(f"the connection to {agent_name} is broken")

    def mend(agent_name):
        backend.write = write
        remove_peer(agent_name)

    backend.write, backend.remove_peer = refuse, mend


def cut_tcp():
    """Ends every TCP connection of this process, in which both sides live."""
    cut = 0
    for name in os.listdir("/proc/self/fd"):
        try:
            own = os.dup(int(name))
        except OSError:  # another thread has closed it since it was listed
            continue
        if not Path("/proc/self/fd", str(own)).is_socket():
            os.close(own)
            continue
        with socket.socket(fileno=own) as one:
            if one.family == socket.AF_INET and one.type == socket.SOCK_STREAM:
                with contextlib.suppress(OSError):  # it only listens
                    one.getpeername()
                    one.shutdown(socket.SHUT_RDWR)
                    cut += 1
    assert cut, "NIXL has no TCP connection"


class Load:
    """Pushes to one decode worker, each of which begins before the one ahead of it has ended."""

    def __init__(self, pair):
        self.pair = pair
        self.begun = 0
        self.ahead: tuple[str, asyncio.Task[object], threading.Event] | None = None

    async def __aenter__(self):
        return self

    async def __aexit__(self, *_):
        if self.ahead is not None:
            self.ahead[2].set()  # no thread waits for the gate of a test that has failed

    async def next(self):
        """Begins one and returns how the one ahead of it ended: None or its error."""
        name, gate = f"push-{self.begun}", threading.Event()
        self.begun += 1
        sender, was_open = self.pair.prefill.sender, self.ahead is not None
        # Nothing is computed, so nothing written, before the next one has begun.
        task = asyncio.create_task(
            self.pair.prefill.run_request(name, self.pair.target, 40, gates={0: gate})
        )
        await eventually(lambda: sender.open_pushes == 1 + was_open)
        ahead, self.ahead = self.ahead, (name, task, gate)
        return await self._end(ahead) if ahead else None

    async def drain(self):
        """Ends the last one."""
        return await self._end(self.ahead)

    async def _end(self, push):
        name, task, gate = push
        gate.set()
        try:
            await task
        except EpdError as error:
            return error
        receiver = self.pair.decode.receiver
        await receiver.wait_sealed(name, 60)
        self.pair.decode.pool.free(receiver.take(name))
        return None


async def test_pushes_that_overlap_without_a_gap_outlive_a_broken_connection(make):
    async with make().running() as pair, Load(pair) as load:
        for _ in range(3):
            assert await load.next() is None
        break_connection(pair)
        failed = []
        while (error := await load.next()) is not None:
            failed.append(error)
            assert len(failed) < MOST_FAILED, f"still broken: {error}"
        assert failed, "nothing was broken"
        assert all(isinstance(error, TransferFailedError) for error in failed)
        for _ in range(3):
            assert await load.next() is None
        assert await load.drain() is None
        await pair.idle()


@pytest.mark.timeout(280)
@pytest.mark.skipif(OVER_TCP, reason="this is that process")
def test_real_connections_that_are_cut_are_made_anew_under_load():
    pass_over_tcp("tests/handover/test_reconnect.py", "nixl", 1)
