"""Ranks of unequal degree in processes of their own, NIXL between them, every byte compared."""

import contextlib
import os
from pathlib import Path

import pytest

from bench.line_process import LineProcess
from epd.engine.head_ranges import writers_of
from tests.handover.ranks import kv_of, of_rank, shape_of

ROOT = Path(__file__).parents[2]
#: Not in order and with neighbours, so that runs and single blocks come up.
LOCAL, REMOTE = [2, 3, 4, 9, 0], [11, 12, 5, 6, 1]


@pytest.mark.parametrize(
    ("heads", "planes", "writers", "readers"),
    [
        (2, 2, 2, 1),
        (2, 2, 1, 2),
        (4, 2, 4, 2),
        (2, 2, 4, 2),  # fewer heads than writing ranks
        (1, 2, 1, 2),  # fewer heads than reading ranks
        (1, 1, 2, 1),  # a latent: one of its holders writes
    ],
)
def test_blocks_of_every_reading_rank_hold_its_heads(heads, planes, writers, readers):
    shape = shape_of(heads, planes)
    env = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    with contextlib.ExitStack() as stack:

        def start(degree, rank):
            module = "tests.handover.rank_process"
            return stack.enter_context(LineProcess(module, heads, planes, degree, rank, env=env))

        writing = [start(writers, rank) for rank in range(writers)]
        reading = [start(readers, rank) for rank in range(readers)]
        for number, reader in enumerate(reading):
            endpoint = reader.ask("hello")
            layout = of_rank(shape, readers, number)
            for writer in writing:
                writer.tell(
                    "write",
                    reader=endpoint,
                    degree=readers,
                    rank=number,
                    local=LOCAL,
                    remote=REMOTE,
                )
            reports = [writer.answer() for writer in writing]
            expected = writers_of(heads, writers, (readers, number))
            assert [rank for rank, one in enumerate(reports) if one["bytes"]] == list(expected)
            total = layout.block_bytes * len(LOCAL) * layout.layer_count
            assert sum(one["bytes"] for one in reports) == total
            most = planes * len(LOCAL) * layout.layer_count
            assert all(one["descriptors"] <= most for one in reports), "none per slot"
            notices = len(expected) * layout.layer_count
            found = reader.ask("read", notices=notices, blocks=REMOTE)
            assert bytes.fromhex(found["kv"]) == kv_of(layout, len(LOCAL)).tobytes()
            assert found["others_clean"]
            assert found["notices"] == notices
            check_digests(reader, layout, writers, reports, expected)


def check_digests(reader, layout, writers, reports, expected):
    """Each writer's digests are of its heads: any byte of them matters, no other does."""
    everywhere = list(range(layout.layer_count))
    first_bytes = {rank: first_byte(layout, heads) for rank, heads in expected.items()}
    for rank in expected:
        for other, spoil in first_bytes.items():
            found = reader.ask(
                "differing",
                degree=writers,
                rank=rank,
                digests=reports[rank]["digests"],
                blocks=REMOTE,
                spoil=spoil,
            )
            assert found["arrived"] == []
            assert found["spoilt"] == (everywhere if other == rank else [])


def first_byte(layout, heads):
    """Where, in the last plane of a reader's block, what these heads hold begins."""
    head_bytes = layout.block_bytes // (layout.planes * layout.heads_held)
    last_plane = (layout.planes - 1) * layout.heads_held
    return (last_plane + heads.start - layout.head_start) * head_bytes
