"""Downloads of single images."""

import asyncio
import ssl
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from urllib.parse import urljoin

import httpcore2

from epd.errors import InvalidRequestError
from services.router.image_urls.address_rule import AddressRule
from services.router.image_urls.allowed_hosts import Address, AllowedHosts
from services.router.image_urls.config import ImageUrlConfig
from services.router.image_urls.guarded_backend import (
    ForbiddenAddressError,
    GuardedBackend,
    Resolver,
    system_addresses,
)

_LOOKUP_THREADS = 4
_REDIRECTS = frozenset({301, 302, 303, 307, 308})
_OK = 200
_HEADERS = [("accept", "image/*"), ("accept-encoding", "identity"), ("user-agent", "epd")]


class Downloads:
    """Fetches files over https within the bounds of its settings. Lives on one event loop.

    Every redirect is checked like the first URL. Connections are never kept for another request.

    Args:
        config: Hosts and bounds.
        max_bytes: Longest file.
        resolve: Looks names up.

    Raises:
        OSError: the file of certificates cannot be read.
    """

    def __init__(
        self, config: ImageUrlConfig, max_bytes: int, resolve: Resolver = system_addresses
    ) -> None:
        self._config = config
        self._max_bytes = max_bytes
        self._hosts = AllowedHosts(config.image_url_hosts)
        self._turns = asyncio.Semaphore(config.image_url_downloads)
        self._threads = ThreadPoolExecutor(_LOOKUP_THREADS, thread_name_prefix="image-url-lookup")
        self._pool = httpcore2.AsyncConnectionPool(
            ssl_context=ssl.create_default_context(cafile=config.image_url_ca_file),
            max_connections=config.image_url_downloads,
            max_keepalive_connections=0,
            network_backend=GuardedBackend(
                AddressRule(config.image_url_networks), self._threads, resolve
            ),
        )

    async def close(self) -> None:
        """Closes what is open."""
        await self._pool.aclose()
        self._threads.shutdown(wait=False, cancel_futures=True)

    async def download(self, url: str, field: str, hold: Callable[[int], None]) -> bytes:
        """The file at a URL.

        Args:
            url: As the client wrote it.
            field: Its path in the request, named in errors.
            hold: Accounts for bytes as they come; may raise.

        Raises:
            InvalidRequestError: the URL or a redirect is not allowed, the host does not answer in
                time or with a file, or the file is too long.
        """
        async with self._turns:
            try:
                async with asyncio.timeout(self._config.image_url_timeout_s):
                    return await self._follow(url, field, hold)
            except TimeoutError:
                raise _failed(
                    f"no image within {self._config.image_url_timeout_s:g} s", field, "TIMEOUT"
                ) from None
            except ForbiddenAddressError:
                raise _failed(
                    "the host's name stands for an address that must not be reached from here",
                    field,
                    "ADDRESS",
                ) from None
            except (
                httpcore2.NetworkError,
                httpcore2.ProtocolError,
                httpcore2.TimeoutException,
            ) as error:
                raise _failed(
                    f"the host does not answer as it should ({type(error).__name__})",
                    field,
                    "UNREACHABLE",
                ) from error

    async def _follow(self, url: str, field: str, hold: Callable[[int], None]) -> bytes:
        for _ in range(self._config.image_url_redirects + 1):
            found = await self._get(self._hosts.checked(url, field), field, hold)
            if isinstance(found, bytes):
                return found
            url = found
        raise _failed(f"more than {self._config.image_url_redirects} redirects", field, "REDIRECTS")

    async def _get(self, address: Address, field: str, hold: Callable[[int], None]) -> bytes | str:
        """The file at an address, or where it redirects to."""
        url = httpcore2.URL(
            scheme="https", host=address.host, port=address.port, target=address.target
        )
        async with self._pool.stream("GET", url, headers=_HEADERS) as response:
            location = _header(response, b"location")
            if response.status in _REDIRECTS and location:
                return _joined(address.url, location)
            if response.status != _OK:
                raise _failed(f"the host answers {response.status}", field, "STATUS")
            if _header(response, b"content-encoding") not in ("", "identity"):
                raise _failed("the host sends the file in a coding of its own", field, "CODING")
            return await self._body(response, field, hold)

    async def _body(
        self, response: httpcore2.Response, field: str, hold: Callable[[int], None]
    ) -> bytes:
        announced = _header(response, b"content-length")
        size = int(announced) if announced.isdecimal() else 0
        chunks: list[bytes] = []
        received = 0
        self._check_size(size, field)
        async for chunk in response.aiter_stream():
            received += len(chunk)
            self._check_size(received, field)
            hold(len(chunk))
            chunks.append(chunk)
        return b"".join(chunks)

    def _check_size(self, size: int, field: str) -> None:
        if size > self._max_bytes:
            raise _failed(f"the file has more than {self._max_bytes} bytes", field, "TOO_LARGE")


def _joined(url: str, location: str) -> str:
    """Where a redirect leads; what is no URL stays as it is, to be refused like any other."""
    try:
        return urljoin(url, location)
    except ValueError:
        return location


def _header(response: httpcore2.Response, name: bytes) -> str:
    values = [value for found, value in response.headers if found.lower() == name]
    return values[0].decode("latin-1") if values else ""


def _failed(text: str, field: str, reason: str) -> InvalidRequestError:
    """A download's error. It names neither addresses nor what the host has said."""
    return InvalidRequestError(text, field=field, reason=f"IMAGE_URL_{reason}")
