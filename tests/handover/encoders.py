"""A stand-in for an encoder: embeddings in registered memory and the leases on them."""

import asyncio
import time

import numpy as np

from epd.errors import UnavailableError
from epd.handover.embedding_handle import EmbeddingHandle
from epd.transfer.buffer import HostBuffer
from tests.transfer.peers import open_agent

WIDTH = 8


class Encoder:
    """Holds embeddings of ``WIDTH`` float32 features; its own control, as the reader sees it."""

    def __init__(self, transport, fabric, address="encoder:1"):
        self.address = address
        self.memory = HostBuffer(4 << 20)
        self.memory.view()[:] = np.random.default_rng(5).integers(
            0, 256, len(self.memory.view()), dtype=np.uint8
        )
        self.agent = open_agent(transport, "encoder", fabric)
        self.agent.register(self.memory.segment)
        self.descriptor = self.agent.descriptor()
        self.known = set()
        self.renewals = 0
        self.renewal_takes_s = 0.0
        self.released = []
        self.error = None
        #: What must end before a handle's embedding is in place.
        self.encoding = {}
        self._next = 0

    def handle(self, tokens, lease_s=60.0, pieces=1):
        """Leave to read the next ``tokens`` rows."""
        byte_count = tokens * WIDTH * 4
        assert byte_count % pieces == 0
        part = byte_count // pieces
        # Pieces lie apart, as in a fragmented cache.
        segments = tuple(self.memory.part(self._next + 2 * n * part, part) for n in range(pieces))
        self._next += 2 * byte_count
        handle_id = f"h{len(self.known)}"
        self.known.add(handle_id)
        return EmbeddingHandle(
            handle_id,
            self.descriptor,
            b"d" * 32,
            segments,
            byte_count,
            (tokens, WIDTH),
            "float32",
            lease_s,
            self.address,
        )

    def content(self, handle):
        return b"".join(
            self.memory.view(one.address - self.memory.address, one.length).tobytes()
            for one in handle.segments
        )

    async def await_ready(self, handle_id):
        """Waits for the test, where it has said that it lets the reader wait."""
        if (wait := self.encoding.get(handle_id)) is not None:
            await wait

    async def renew(self, handle_ids):
        if self.error is not None:
            raise self.error
        self.renewals += 1
        await asyncio.sleep(self.renewal_takes_s)
        return [one for one in handle_ids if one not in self.known]

    async def release(self, handle_ids, settled):
        if self.error is not None:
            raise self.error
        self.released.append((time.monotonic(), tuple(handle_ids), settled))
        if settled:
            self.known -= set(handle_ids)

    @property
    def last_words(self):
        """What was said about being settled, in order."""
        return [settled for _, _, settled in self.released]

    def die(self):
        self.agent.stop()
        self.error = UnavailableError("connection refused")
