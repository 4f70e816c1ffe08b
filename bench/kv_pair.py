"""Sending and receiving process of kv_transfer over one transport."""

import os
from types import TracebackType

from bench.harness import Sample, interleave
from bench.line_process import LineProcess
from bench.synthetic_kv import SHAPE, blocks_of

#: Transport to UCX_TLS. Shared memory needs TCP beside it to notice a dead peer.
TRANSPORTS = {"shm": "sm,tcp,self", "tcp": "tcp,self"}
BLOCK_BYTES = SHAPE.block_bytes * SHAPE.layer_count
MIB = 1 << 20


class KvPair:
    """Two processes with half as many blocks again as the largest transfer takes.

    A context manager.
    """

    def __init__(self, transport: str, largest_mib: int) -> None:
        env = {**os.environ, "UCX_TLS": TRANSPORTS[transport]}
        num_blocks = blocks_of(largest_mib * MIB) * 3 // 2 + 1
        self._decode = LineProcess("bench.kv_decode_process", num_blocks, env=env)
        self._prefill = LineProcess("bench.kv_prefill_process", num_blocks, env=env)
        self._transfers = 0

    def __enter__(self) -> "KvPair":
        theirs = self._decode.ask("hello")
        self._decode.ask("meet", **self._prefill.ask("meet", **theirs))
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._prefill.__exit__(kind, error, trace)
        self._decode.__exit__(kind, error, trace)

    def measure(self, size_mib: int, rounds: int, seed: int) -> list[Sample]:
        """Both arms in turns, in milliseconds, after a look at the bytes that arrive."""
        count = blocks_of(size_mib * MIB)
        self._check(seed, count)
        arms = {"raw": lambda s: self._raw(s, count), "epd": lambda s: self._epd(s, count)}
        return interleave(arms, rounds, seed)

    def idle_percent(self, seconds: float) -> float:
        """Of a core: what the receiving transfer thread takes while nothing is announced."""
        return 100 * float(self._decode.ask("idle_share", seconds=seconds))

    def _blocks(self, seed: int, count: int) -> tuple[list[int], list[int]]:
        """Those of one round, here and there; the same for both arms."""
        local = self._prefill.ask("choose", seed=seed, count=count)
        return local, self._decode.ask("choose", seed=seed, count=count)

    def _name(self) -> str:
        self._transfers += 1
        return f"{self._transfers:032x}"

    def _raw(self, seed: int, count: int) -> float:
        local, remote = self._blocks(seed, count)
        notice = self._name()
        self._decode.tell("await_raw", notice=notice)
        started_ns = self._prefill.ask("write_raw", local=local, remote=remote, notice=notice)
        return float(self._decode.answer() - started_ns) / 1e6

    def _epd(self, seed: int, count: int) -> float:
        local, _ = self._blocks(seed, count)
        transfer_id = self._name()
        self._decode.tell("await_sealed", transfer_id=transfer_id)
        started_ns = self._prefill.ask("push", local=local, transfer_id=transfer_id)
        return float(self._decode.answer() - started_ns) / 1e6

    def _check(self, seed: int, count: int) -> None:
        """Both arms must move the right bytes; each to other blocks than the one before."""
        for number, arm in enumerate((self._raw, self._epd)):
            arm(seed + number, count)
            local, remote = self._blocks(seed + number, count)
            sums = (
                self._prefill.ask("checksum", blocks=local),
                self._decode.ask("checksum", blocks=remote),
            )
            if sums[0] != sums[1]:
                raise RuntimeError(f"{arm.__name__}: other bytes arrived than were sent")
