"""A real https server on loopback that serves what a test wants."""

import asyncio
import contextlib
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

AUTHORITY = Path(__file__).parent / "certificates" / "authority.pem"
_CERTIFICATE = Path(__file__).parent / "certificates" / "host.pem"

Reader = asyncio.StreamReader
Writer = asyncio.StreamWriter


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
    context.load_cert_chain(_CERTIFICATE)
    server = await asyncio.start_server(host.handle, address, port, ssl=context)
    host.port = server.sockets[0].getsockname()[1]
    try:
        yield host
    finally:
        server.close()
