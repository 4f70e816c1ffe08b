"""One embedding as a file: 128 bytes of header, then the embedding.

The header holds magic, content digest, element type, shape, patch grid and a BLAKE3 digest of all
that and of the embedding, so a file that was cut, overwritten or half written is known as such.
"""

import mmap
import os
import struct
from pathlib import Path

import numpy as np
import numpy.typing as npt
from blake3 import blake3

from epd.encoding.embedding import EmbeddingSpec

HEADER_BYTES = 128
#: Files take whole pages of the disk.
PAGE_BYTES = 4096
_MAGIC = b"EPDEMB01"
_FIELDS = struct.Struct("<8s32s8sQQIII")
_CHECKSUM_BYTES = 32


class DamagedRecordError(Exception):
    """The file is not the whole record of this embedding."""


def record_bytes(spec: EmbeddingSpec) -> int:
    """Disk space of a record."""
    return -(-(HEADER_BYTES + spec.byte_count) // PAGE_BYTES) * PAGE_BYTES


def write_record(
    path: Path, digest: bytes, spec: EmbeddingSpec, memory: npt.NDArray[np.uint8]
) -> None:
    """Writes a record under a temporary name and renames it: whole or not there.

    That holds when this process dies at any moment. After a power cut the file system may keep the
    name and lose the bytes; the checksum tells. So nothing is forced to the disk here.

    Raises:
        OSError: the disk is full or broken; nothing is left behind as far as possible.
    """
    fields = _fields(digest, spec)
    header = (fields + _checksum(fields, memory)).ljust(HEADER_BYTES, b"\0")
    partial = path.with_suffix(".partial")
    try:
        with partial.open("wb") as file:
            file.write(header)
            file.write(memory.data)
        partial.replace(path)
    except OSError:
        partial.unlink(missing_ok=True)
        raise


def read_record(
    path: Path, digest: bytes, spec: EmbeddingSpec, memory: npt.NDArray[np.uint8]
) -> None:
    """Copies the embedding of a record into ``memory``. What fails leaves anything in there.

    The caller owns the folder and never shortens a file, so no page of the mapping can vanish.

    Raises:
        DamagedRecordError: not the whole record of this very embedding.
        OSError: there is no such file, or it cannot be read.
    """
    with path.open("rb") as file:
        if os.fstat(file.fileno()).st_size != HEADER_BYTES + spec.byte_count:
            raise DamagedRecordError(f"{path.name} has the wrong length")
        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as mapped:
            header = mapped[:HEADER_BYTES]
            np.copyto(memory, np.frombuffer(mapped, np.uint8, offset=HEADER_BYTES))
    fields = _fields(digest, spec)
    # The copy is what is checked: it is what will be used.
    if header != (fields + _checksum(fields, memory)).ljust(HEADER_BYTES, b"\0"):
        raise DamagedRecordError(f"{path.name} does not match its checksum")


def _fields(digest: bytes, spec: EmbeddingSpec) -> bytes:
    tokens, features = spec.shape
    return _FIELDS.pack(_MAGIC, digest, spec.dtype.encode(), tokens, features, *spec.plan.grid)


def _checksum(fields: bytes, memory: npt.NDArray[np.uint8]) -> bytes:
    return blake3(fields).update(memory.data).digest(length=_CHECKSUM_BYTES)
