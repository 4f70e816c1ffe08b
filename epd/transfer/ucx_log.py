"""What the UCX library of this process logs."""

import contextlib
import ctypes
import fcntl
import functools
import logging
import os
import select
import threading
from collections.abc import Iterator

from epd.transfer.ucx_tables import UcxTables

log = logging.getLogger("ucx")

#: Whoever sets one of these wants UCX's log as UCX writes it.
_USERS = ("UCX_LOG_FILE", "UCX_LOG_LEVEL", "UCX_PROTO_INFO")
#: Tables of WRITEs and READs alone: those of messages say nothing about KV.
_TABLES = "*remote memory*"
#: So much fits while this process is busy elsewhere.
_PIPE_BYTES = 1 << 20
#: UCX writes through the C library and leaves lines in its buffer: they are fetched so often.
_FLUSH_S = 0.5
_LEVELS = {" ERROR ": logging.ERROR, " FATAL ": logging.CRITICAL, " WARN ": logging.WARNING}


class UcxLog:
    """Reads what UCX logs: tables for :attr:`carriers`, everything else goes to our log.

    UCX opens its log when the library is loaded, once in a process, so there is one of these (see
    :func:`ucx_log`). Its thread ends with the process.
    """

    def __init__(self) -> None:
        self._tables = UcxTables()
        self._source, self._sink = os.pipe()
        with contextlib.suppress(OSError):  # more than this user may have: as large as it is
            fcntl.fcntl(self._sink, fcntl.F_SETPIPE_SZ, _PIPE_BYTES)
        threading.Thread(target=self._read, name="ucx-log", daemon=True).start()

    @contextlib.contextmanager
    def captured(self) -> Iterator[None]:
        """UCX, when it is loaded and set up in here, logs to this object.

        It changes the environment, which UCX reads, and restores it: children shall not write here.
        """
        if any(name in os.environ for name in _USERS):
            yield
            return
        os.environ["UCX_LOG_FILE"] = f"/proc/self/fd/{self._sink}"
        os.environ["UCX_PROTO_INFO"] = _TABLES
        try:
            yield
        finally:
            del os.environ["UCX_LOG_FILE"], os.environ["UCX_PROTO_INFO"]

    @property
    def carriers(self) -> tuple[str, ...]:
        """What moves the bytes, of all connections so far; nothing where the log is the user's."""
        return self._tables.carriers

    def _read(self) -> None:
        flush, begun = ctypes.CDLL(None).fflush, b""
        while True:
            flush(None)
            if not select.select([self._source], [], [], _FLUSH_S)[0]:
                continue
            *lines, begun = (begun + os.read(self._source, _PIPE_BYTES)).split(b"\n")
            for line in lines:
                self._take(line.decode(errors="replace").rstrip())

    def _take(self, line: str) -> None:
        if not self._tables.take(line):
            level = next((_LEVELS[word] for word in _LEVELS if word in line), logging.INFO)
            log.log(level, "%s", line)


@functools.cache
def ucx_log() -> UcxLog:
    """The process's one."""
    return UcxLog()
