"""NIXL as its own documentation uses it, without anything of ours: the arm to be compared with."""

import importlib
import logging
import time
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from epd.engine.kv_layout import KvLayout, KvRegion
from epd.thread_slices import sleep_exactly
from epd.transfer.base import Segment
from epd.transfer.poll_wait import PollWait

TIMEOUT_S = 60.0


class RawNixl:
    """One agent. A side that waits polls as often as ours, at least every ``poll_s``."""

    def __init__(self, name: str, memory: Segment, poll_s: float) -> None:
        self._nixl: Any = importlib.import_module("nixl_cu12")
        logging.getLogger("nixl").handlers.clear()  # it logs to stdout, which is for answers
        self._poll_s = poll_s
        config = self._nixl.nixl_agent_config(
            enable_prog_thread=False,
            enable_listen_thread=False,
            backends=[],
            sync_mode=self._nixl.nixl_thread_sync_t.NIXL_THREAD_SYNC_RW,
        )
        self._agent = self._nixl.nixl_agent(name, config)
        self._agent.create_backend("UCX", {"ucx_error_handling_mode": "peer"})
        row = (memory.address, memory.length, 0, "")
        self._agent.register_memory([row], "DRAM", backends=["UCX"])

    def metadata(self) -> bytes:
        """What a peer needs to connect."""
        return bytes(self._agent.get_agent_metadata())

    def connect(self, metadata: bytes) -> str:
        """Makes a peer known; returns its name."""
        return bytes(self._agent.add_remote_agent(metadata)).decode()

    def write(
        self,
        peer: str,
        layouts: tuple[KvLayout, KvLayout],
        blocks: tuple[Sequence[int], Sequence[int]],
        notice: bytes,
    ) -> int:
        """Copies all layers of the blocks here to those there in one WRITE, and waits for its end.

        Returns when it began, before descriptors were made, on the machine's monotonic clock.
        """
        sleep_exactly()  # as our agent's thread does
        started_ns = time.monotonic_ns()
        here, there = (
            self._agent.get_xfer_descs(_rows(layout.regions[0], ids), "DRAM")
            for layout, ids in zip(layouts, blocks, strict=True)
        )
        handle = self._agent.initialize_xfer("WRITE", here, there, peer, notice, backends=["UCX"])
        state = self._agent.transfer(handle)
        wait = PollWait()
        while state == "PROC":
            state = self._agent.check_xfer_state(handle)
            time.sleep(wait.after(state != "PROC", self._poll_s))
        if state != "DONE":
            raise RuntimeError(f"the raw WRITE ended as {state}")
        self._agent.release_xfer_handle(handle)
        return started_ns

    def wait_notice(self, notice: bytes) -> int:
        """Waits for a notice; returns when it was seen."""
        sleep_exactly()
        give_up = time.monotonic() + TIMEOUT_S
        wait = PollWait()
        while time.monotonic() < give_up:
            arrived = self._agent.get_new_notifs()
            if any(notice in messages for messages in arrived.values()):
                return time.monotonic_ns()
            time.sleep(wait.after(bool(arrived), self._poll_s))
        raise TimeoutError(f"no notice in {TIMEOUT_S:g} s")


def _rows(region: KvRegion, blocks: Sequence[int]) -> npt.NDArray[np.uint64]:
    """(address, length, device) of every block of every layer."""
    layers = np.arange(region.layer_count, dtype=np.uint64)[:, None] * region.layer_stride
    offsets = np.asarray(blocks, dtype=np.uint64)[None] * region.block_stride
    rows = np.zeros((layers.size * offsets.size, 3), dtype=np.uint64)
    rows[:, 0] = (region.address + layers + offsets).ravel()
    rows[:, 1] = region.block_stride
    return rows
