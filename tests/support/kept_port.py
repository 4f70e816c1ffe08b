"""A port that stays with a process of ours while nobody listens there."""

import contextlib
import socket
from collections.abc import Iterator


def keep_port(address: str) -> socket.socket:
    """Keeps ``host:port`` until the socket is closed; port 0 picks one.

    The kernel gives a kept port to nobody who asks for any free one, as tests in another process do
    all the time. Who asks for this very port can listen on it, as long as it sets SO_REUSEADDR as
    servers do. While somebody listens there it cannot be kept: raises OSError.
    """
    host, _, port = address.rpartition(":")
    kept = socket.socket()
    try:
        kept.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        kept.bind((host, int(port)))
    except BaseException:
        kept.close()
        raise
    return kept


@contextlib.contextmanager
def kept_port(host: str = "127.0.0.1") -> Iterator[int]:
    """A free port for a process that is started inside."""
    with keep_port(f"{host}:0") as kept:
        yield kept.getsockname()[1]
