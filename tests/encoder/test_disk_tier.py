"""The second tier in a running encoder, over restarts, damage and full disks.

Starting an encoder is what takes time here (its preprocessing process imports transformers), so a
test has one only where the way through the encoder is the point.
"""

import asyncio
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from epd.encoding import disk_folder, disk_record
from epd.encoding.disk_index import DiskIndex
from epd.encoding.disk_tier import DiskTier, DiskTierConfig
from epd.encoding.encoder import Encoder
from epd.errors import UnavailableError
from tests.encoder.calls import Caller
from tests.encoder.conftest import MakeEncoder
from tests.encoder.watched import ONE, Watched, file, until

#: Disk space of one embedding: three pages for a header and two pages of data.
RECORD = 3 * 4096


async def embed(encoder: Encoder, caller: Caller, seed: int) -> torch.Tensor:
    """The embedding of a picture, given back at once."""
    answer = await caller.encode(encoder, file(seed))
    embedding = encoder.embedding(answer.handle_ids[0]).clone()
    encoder.release(answer.handle_ids, settled=True)
    return embedding


def records(folder: Path) -> list[Path]:
    """Every file but the lock."""
    return [path for path in folder.iterdir() if path.name != "lock"]


async def settled(encoder: Encoder) -> None:
    """Waits until nothing is being written."""
    await until(lambda: encoder.stats().in_use_bytes == 0)


@asynccontextmanager
async def opened(folder: Path, capacity_bytes: int = 1 << 20) -> AsyncIterator[DiskTier]:
    """A tier without an encoder."""
    tier = DiskTier(DiskTierConfig(folder, capacity_bytes, max_writes=1))
    await tier.open()
    yield tier
    await tier.close()


def settings(folder: Path, **others: Any) -> dict[str, Any]:
    """Nothing is kept in memory, so that only the disk can answer."""
    return {"embedding_cache_bytes": 0, "embedding_disk_folder": str(folder), **others}


async def test_an_embedding_survives_a_restart_and_no_forward_pass_is_run(
    make_encoder: MakeEncoder, caller: Caller, watched: Watched, tmp_path: Path
) -> None:
    first = await make_encoder(watched, **settings(tmp_path))
    made = await embed(first, caller, 0)
    await settled(first)
    assert (first.stats().disk.writes, first.stats().disk_bytes) == (1, RECORD)
    await first.stop()
    second = await make_encoder(watched, **settings(tmp_path))
    answer = await caller.encode(second, file(0))
    assert [stage.name for stage in answer.ready[0].stages] == ["plan", "queue", "disk_read"]
    assert torch.equal(second.embedding(answer.handle_ids[0]), made)
    second.release(answer.handle_ids, settled=True)
    assert watched.calls == [1]
    assert second.stats().disk.hits == 1
    assert second.stats().disk.writes == 0  # it is there already


async def test_a_damaged_record_is_made_again_and_written_anew(
    make_encoder: MakeEncoder, caller: Caller, watched: Watched, tmp_path: Path
) -> None:
    encoder = await make_encoder(watched, **settings(tmp_path))
    made = await embed(encoder, caller, 0)
    await settled(encoder)
    (record,) = records(tmp_path)
    whole = record.read_bytes()
    damaged = {
        "flipped": whole[:-1] + bytes([whole[-1] ^ 1]),
        "cut": whole[: len(whole) // 2],
        "empty": b"",
        "deleted": None,
    }
    for number, (damage, content) in enumerate(damaged.items(), 1):
        if content is None:
            record.unlink()
        else:
            record.write_bytes(content)
        assert torch.equal(await embed(encoder, caller, 0), made), damage
        await settled(encoder)
        assert len(watched.calls) == 1 + number, damage
        assert record.read_bytes() == whole, damage
        assert torch.equal(await embed(encoder, caller, 0), made), damage
        assert encoder.stats().disk.hits == number, damage
    assert encoder.stats().disk.damaged == 3  # one that is not there is not damaged


async def test_the_folder_never_outgrows_its_bound_and_the_least_recently_used_go(
    make_encoder: MakeEncoder, caller: Caller, watched: Watched, tmp_path: Path
) -> None:
    bound = settings(tmp_path, embedding_disk_bytes=3 * RECORD)
    encoder = await make_encoder(watched, **bound)
    for seed in (0, 1, 2, 0, 3, 4):  # 0 is used again, so 1 and 2 make room
        await embed(encoder, caller, seed)
        await settled(encoder)
        on_disk = sum(path.stat().st_blocks * 512 for path in records(tmp_path))
        assert on_disk <= encoder.stats().disk_bytes <= 3 * RECORD
    calls = len(watched.calls)
    for seed in (0, 3, 4):
        await embed(encoder, caller, seed)
    assert len(watched.calls) == calls
    await encoder.stop()
    # A smaller bound after a restart holds too; the order of use is remembered.
    async with opened(tmp_path, capacity_bytes=RECORD) as smaller:
        assert smaller.used_bytes == RECORD
        assert smaller.holds(caller.images([file(4)])[0].digest)
        await until(lambda: len(records(tmp_path)) == 1)


async def test_what_a_killed_process_left_half_written_is_cleared_away(tmp_path: Path) -> None:
    (tmp_path / f"{'ab' * 32}.partial").write_bytes(b"half")
    (tmp_path / "somebody else's.embedding").write_bytes(b"kept")
    async with opened(tmp_path) as tier:
        assert tier.used_bytes == 0
    assert [path.name for path in records(tmp_path)] == ["somebody else's.embedding"]


async def test_a_folder_in_use_is_refused_and_free_after_a_stop(
    make_encoder: MakeEncoder, tmp_path: Path
) -> None:
    async with opened(tmp_path):
        with pytest.raises(UnavailableError, match="another process uses it"):
            await make_encoder(**settings(tmp_path))
    async with opened(tmp_path):
        pass


async def test_a_disk_that_fails_costs_no_request(
    make_encoder: MakeEncoder, caller: Caller, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*arguments: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(disk_folder, "write_record", full)
    encoder = await make_encoder(**settings(tmp_path))
    first = await embed(encoder, caller, 0)
    await settled(encoder)
    assert torch.equal(await embed(encoder, caller, 0), first)
    await settled(encoder)
    stats = encoder.stats()
    assert (stats.disk.dropped, stats.disk.writes, stats.disk_bytes) == (2, 0, 0)


async def test_writes_beyond_the_queue_are_dropped_and_counted(
    make_encoder: MakeEncoder, caller: Caller, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate, write = threading.Event(), disk_record.write_record

    def held_up(*arguments: Any) -> None:
        gate.wait(60)
        write(*arguments)

    monkeypatch.setattr(disk_folder, "write_record", held_up)
    encoder = await make_encoder(**settings(tmp_path, embedding_disk_writes=2))
    for seed in range(4):
        await embed(encoder, caller, seed)  # a slow disk holds up nobody
    assert encoder.stats().disk.dropped == 2
    assert encoder.stats().in_use_bytes == 2 * ONE  # pinned for the two that wait
    gate.set()
    await settled(encoder)
    assert encoder.stats().disk.writes == 2


async def test_a_cancelled_load_keeps_the_memory_until_the_thread_is_through(
    make_encoder: MakeEncoder, caller: Caller, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    encoder = await make_encoder(**settings(tmp_path))
    await embed(encoder, caller, 0)
    await settled(encoder)
    gate, begun, read = threading.Event(), threading.Event(), disk_record.read_record

    def held_up(*arguments: Any) -> None:
        begun.set()
        gate.wait(60)
        read(*arguments)

    monkeypatch.setattr(disk_folder, "read_record", held_up)
    call = asyncio.create_task(caller.encode(encoder, file(0)))
    await until(begun.is_set)
    call.cancel()
    await asyncio.gather(call, return_exceptions=True)
    assert encoder.stats().in_use_bytes == ONE
    gate.set()
    await until(lambda: encoder.stats().in_use_bytes == 0)


def test_reserved_room_counts_and_what_never_fits_evicts_nothing() -> None:
    index = DiskIndex(10)
    assert index.fill([(b"a", 4), (b"b", 4)]) == []
    assert index.reserve(11) is None
    assert len(index) == 2
    assert index.reserve(4) == [b"a"]
    assert index.used_bytes == 8
    index.unreserve(4)
    assert index.used_bytes == 4
    generator = np.random.default_rng(0)
    for number in range(200):
        size = int(generator.integers(1, 12))
        if index.reserve(size) is not None:
            index.add(number.to_bytes(2), size)
        assert index.used_bytes <= 10
