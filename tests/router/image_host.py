"""A real https server on loopback that serves what a test wants."""

import asyncio
import contextlib
import functools
import ssl
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import trustme

NAMES = ("localhost", "images.test", "inner.test")
Reader = asyncio.StreamReader
Writer = asyncio.StreamWriter


class _Authority:
    """The CA of all image hosts of this run."""

    def __init__(self) -> None:
        ca = trustme.CA()
        self.certificate = ca.issue_cert(*NAMES)
        self._folder = tempfile.TemporaryDirectory(prefix="epd-test-authority-")
        self.file = Path(self._folder.name) / "authority.pem"
        ca.cert_pem.write_to_path(str(self.file))


@functools.cache
def _authority() -> _Authority:
    return _Authority()


def authority_file() -> Path:
    """Certificate of the authority that image hosts' certificates come from."""
    return _authority().file


class ImageHost:
    """Answers by path; counts connections, and requests by path."""

    def __init__(self) -> None:
        self.port = 0
        self.connections = 0
        self.requests: list[str] = []
        self.answers: dict[str, bytes | Callable[[Reader, Writer], Awaitable[None]]] = {}

    def file(self, path: str, body: bytes, status: str = "200 OK", **headers: str) -> None:
        """Serves a file with its length, unless other headers are given."""
        lines = {"content-length": str(len(body)), **headers}
        head = "".join(f"{name.replace('_', '-')}: {value}\r\n" for name, value in lines.items())
        self.answers[path] = f"HTTP/1.1 {status}\r\n{head}\r\n".encode() + body

    def redirect(self, path: str, location: str) -> None:
        """Sends whoever asks for ``path`` elsewhere."""
        self.file(path, b"", "302 Found", location=location)

    async def handle(self, reader: Reader, writer: Writer) -> None:
        """One connection, one request."""
        self.connections += 1
        with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError, ssl.SSLError):
            head = (await reader.readuntil(b"\r\n\r\n")).decode()
            path = head.split(" ")[1]
            self.requests.append(path)
            answer = self.answers.get(path, b"HTTP/1.1 404 Not Found\r\ncontent-length: 0\r\n\r\n")
            if isinstance(answer, bytes):
                writer.write(answer)
                await writer.drain()
            else:
                await answer(reader, writer)
        writer.close()


@contextlib.asynccontextmanager
async def image_host(address: str = "127.0.0.1", port: int = 0) -> AsyncIterator[ImageHost]:
    """A running server with the test authority's certificate; port 0 picks one."""
    host = ImageHost()
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    _authority().certificate.configure_cert(context)
    server = await asyncio.start_server(host.handle, address, port, ssl=context)
    host.port = server.sockets[0].getsockname()[1]
    try:
        yield host
    finally:
        server.close()
