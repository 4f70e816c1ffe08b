"""An embedding as a file: whole, or known not to be."""

import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from epd.encoding.disk_record import (
    HEADER_BYTES,
    DamagedRecordError,
    read_record,
    record_bytes,
    write_record,
)
from epd.encoding.embedding import EmbeddingSpec
from epd.engine.families.base import ImagePlan

DIGEST = bytes(range(32))
SPEC = EmbeddingSpec(ImagePlan((1, 8, 4), 7, (7,) * 8, 0, 8), (8, 16), "float32")


def filled(seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, SPEC.byte_count, dtype=np.uint8)


def read(path: Path, digest: bytes = DIGEST, spec: EmbeddingSpec = SPEC) -> np.ndarray:
    memory = np.zeros(spec.byte_count, np.uint8)
    read_record(path, digest, spec, memory)
    return memory


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "one.embedding"
    write_record(path, DIGEST, SPEC, filled())
    return path


def test_what_is_written_is_read(path: Path) -> None:
    assert np.array_equal(read(path), filled())
    assert path.stat().st_size <= record_bytes(SPEC)
    assert list(path.parent.iterdir()) == [path]


def test_a_file_cut_at_any_byte_is_damaged(path: Path) -> None:
    whole = path.read_bytes()
    for length in range(len(whole)):
        path.write_bytes(whole[:length])
        with pytest.raises(DamagedRecordError):
            read(path)


def test_any_flipped_byte_is_found(path: Path) -> None:
    whole = path.read_bytes()
    assert len(whole) == HEADER_BYTES + SPEC.byte_count
    for position in range(len(whole)):
        changed = bytearray(whole)
        changed[position] ^= 1 << position % 8
        path.write_bytes(changed)
        with pytest.raises(DamagedRecordError):
            read(path)


def test_bytes_lost_at_a_power_cut_are_found(path: Path) -> None:
    """The name is there and its last pages are zeros."""
    whole = path.read_bytes()
    for kept in range(0, len(whole), 16):
        path.write_bytes(whole[:kept] + bytes(len(whole) - kept))
        with pytest.raises(DamagedRecordError):
            read(path)


@pytest.mark.parametrize(
    ("digest", "spec"),
    [
        (bytes(32), SPEC),
        (DIGEST, EmbeddingSpec(SPEC.plan, (16, 8), "float32")),
        (DIGEST, EmbeddingSpec(SPEC.plan, (8, 32), "bfloat16")),
        (DIGEST, EmbeddingSpec(ImagePlan((1, 4, 8), 7, (7,) * 8, 0, 8), (8, 16), "float32")),
    ],
    ids=["image", "shape", "type", "grid"],
)
def test_the_record_of_another_embedding_is_not_taken_for_this_one(
    path: Path, digest: bytes, spec: EmbeddingSpec
) -> None:
    with pytest.raises(DamagedRecordError):
        read(path, digest, spec)


WRITER = f"""
import sys
import time
from pathlib import Path
import numpy as np
from epd.encoding.disk_record import write_record
from epd.encoding.embedding import EmbeddingSpec
from epd.engine.families.base import ImagePlan
spec = EmbeddingSpec(ImagePlan((1, 8, 4), 7, (7,) * 8, 0, 8), (8, {1 << 18}), "float32")
memory = np.ones(spec.byte_count, np.uint8)
print("ready", flush=True)
while True:
    for number in range(4):
        write_record(Path(sys.argv[1]) / f"{{number}}.embedding", bytes(32), spec, memory)
"""


@pytest.mark.parametrize("number", range(5))
def test_a_process_killed_while_it_writes_leaves_only_whole_records(
    tmp_path: Path, number: int
) -> None:
    spec = EmbeddingSpec(SPEC.plan, (8, 1 << 18), "float32")
    writer = subprocess.Popen([sys.executable, "-c", WRITER, str(tmp_path)], stdout=subprocess.PIPE)
    assert writer.stdout is not None
    assert writer.stdout.readline() == b"ready\n"
    while not list(tmp_path.glob("*.embedding")):
        time.sleep(0.001)  # the writer may have to share this core
    writer.send_signal(signal.SIGKILL)
    writer.wait()
    memory = np.zeros(spec.byte_count, np.uint8)
    records = list(tmp_path.glob("*.embedding"))
    for record in records:
        read_record(record, bytes(32), spec, memory)
        assert memory.all()
    assert records
