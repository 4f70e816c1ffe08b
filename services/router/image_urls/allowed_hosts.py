"""Which URLs may be asked at all, by what is written in them."""

import re
from collections.abc import Iterable
from dataclasses import dataclass
from urllib.parse import SplitResult, urlsplit

from epd.errors import InvalidRequestError

HTTPS_PORT = 443
_MAX_URL_CHARS = 4096
#: What a URL may hold as it stands; anything else has to be percent-encoded, names in punycode.
_URL_CHARACTERS = re.compile(r"[!-~]+")
_HOST = re.compile(r"[a-z0-9_]([a-z0-9_.-]*[a-z0-9])?")


@dataclass(frozen=True)
class Address:
    """A checked URL: https, and host and port are on the list. ``target`` is path and query."""

    url: str
    host: str
    port: int
    target: str


class AllowedHosts:
    """The list.

    Args:
        entries: ``example.org`` is that host, ``.example.org`` all hosts below it; ``:port`` at the
            end allows that port in place of 443.

    Raises:
        ValueError: an entry is none of these.
    """

    def __init__(self, entries: Iterable[str]) -> None:
        self._entries = {_entry(text) for text in entries}

    def checked(self, url: str, field: str) -> Address:
        """The parts of an allowed URL.

        Nothing but these parts is used afterwards, so no two parsers can disagree about them.

        Raises:
            InvalidRequestError: it is not https, not well-formed or not on the list.
        """
        if len(url) > _MAX_URL_CHARS or not _URL_CHARACTERS.fullmatch(url):
            raise _refused("the URL has blanks, other than ASCII characters, or too many", field)
        try:
            parts = urlsplit(url)
            port = parts.port or HTTPS_PORT
        except ValueError:
            raise _refused("the URL is malformed", field) from None
        host = (parts.hostname or "").rstrip(".")
        if parts.scheme != "https":
            raise _refused("images are taken from https URLs only", field)
        if "@" in parts.netloc or "\\" in url or not _HOST.fullmatch(host):
            raise _refused("the URL's host is malformed, or there is a user name before it", field)
        if not self._allows(host, port):
            raise InvalidRequestError(
                f"{host}:{port} is none of the hosts that images may be taken from",
                field=field,
                reason="IMAGE_URL_HOST",
            )
        return Address(url, host, port, _target(parts))

    def _allows(self, host: str, port: int) -> bool:
        return any(
            port == allowed_port
            and (host == name or (name.startswith(".") and host.endswith(name)))
            for name, allowed_port in self._entries
        )


def _entry(text: str) -> tuple[str, int]:
    name, colon, port = text.strip().lower().partition(":")
    if not _HOST.fullmatch(name.removeprefix(".")) or (colon and not port.isdecimal()):
        raise ValueError(f"image_url_hosts: {text!r} is no host, .host, host:port or .host:port")
    return name, int(port) if colon else HTTPS_PORT


def _target(parts: SplitResult) -> str:
    return (parts.path or "/") + (f"?{parts.query}" if parts.query else "")


def _refused(text: str, field: str) -> InvalidRequestError:
    return InvalidRequestError(text, field=field, reason="IMAGE_URL")
