"""The folder of the disk tier: one file per embedding, named by its image's digest. Blocking."""

import contextlib
import fcntl
import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import IO

import numpy as np
import numpy.typing as npt

from epd.encoding.disk_record import PAGE_BYTES, read_record, write_record
from epd.encoding.embedding import EmbeddingSpec
from epd.errors import UnavailableError
from epd.image_digest import DIGEST_BYTES

_SUFFIX = ".embedding"


class DiskFolder:
    """Files of one process, which holds a lock on the folder while it lives."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._lock: IO[bytes] | None = None

    def take(self) -> list[tuple[bytes, int]]:
        """Locks the folder and clears away what a dying process has left half written.

        Returns digest and disk space of every record, least recently used first.

        Raises:
            UnavailableError: another process has it, or it cannot be used.
        """
        try:
            self.path.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._lock = (self.path / "lock").open("wb")
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            for partial in self.path.glob("*.partial"):
                partial.unlink()
            records = []
            for path in self.path.glob(f"*{_SUFFIX}"):
                if (digest := _digest_of(path)) is not None:
                    status = path.stat()
                    size = -(-status.st_size // PAGE_BYTES) * PAGE_BYTES
                    records.append((status.st_mtime_ns, digest, size))
        except OSError as error:
            self.give_back()
            raise UnavailableError(
                f"the folder {self.path} of the embedding disk tier cannot be used, or another "
                f"process uses it: {error.strerror}",
                reason="DISK_TIER_UNAVAILABLE",
            ) from error
        return [(digest, size) for _, digest, size in sorted(records)]

    def give_back(self) -> None:
        """Unlocks the folder."""
        if self._lock is not None:
            self._lock.close()
            self._lock = None

    def read(self, digest: bytes, spec: EmbeddingSpec, memory: npt.NDArray[np.uint8]) -> None:
        """As :func:`read_record`; the time of the last use is kept in the file's own."""
        path = self._file(digest)
        read_record(path, digest, spec, memory)
        now_ns = time.time_ns()  # the kernel's own stamps are milliseconds apart
        with contextlib.suppress(FileNotFoundError):  # evicted meanwhile
            os.utime(path, ns=(now_ns, now_ns))

    def write(
        self,
        digest: bytes,
        spec: EmbeddingSpec,
        memory: npt.NDArray[np.uint8],
        victims: Sequence[bytes],
    ) -> None:
        """As :func:`write_record`, once the victims have made room."""
        self.remove(victims)
        write_record(self._file(digest), digest, spec, memory)

    def remove(self, digests: Sequence[bytes]) -> None:
        """Deletes records; those that are gone already are fine."""
        for digest in digests:
            self._file(digest).unlink(missing_ok=True)

    def _file(self, digest: bytes) -> Path:
        return self.path / (digest.hex() + _SUFFIX)


def _digest_of(path: Path) -> bytes | None:
    """The digest a file is named by; None for a file of somebody else."""
    try:
        digest = bytes.fromhex(path.stem)
    except ValueError:
        return None
    return digest if len(digest) == DIGEST_BYTES else None
