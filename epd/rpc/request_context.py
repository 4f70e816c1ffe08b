"""The id of the request that the current call belongs to, for error details and log lines."""

import contextvars
import secrets
from typing import Any

#: Most characters of an id that a client chooses.
MAX_ID_LENGTH = 128
_request_id: contextvars.ContextVar[str] = contextvars.ContextVar("epd_request_id", default="")


def new_id() -> str:
    """128 random bits, hexadecimal. No value has a special meaning."""
    return secrets.token_hex(16)


def set_request_id(request_id: str) -> None:
    """Names the request of the current call, where the service mints the id itself."""
    _request_id.set(request_id)


def request_id() -> str:
    """The request's id; empty outside calls."""
    return _request_id.get()


def is_request_id(text: str) -> bool:
    """Whether a client may choose this id: it stands in log lines, so it must not end one."""
    return 0 < len(text) <= MAX_ID_LENGTH and text.isprintable()


def begin_call(request: Any) -> None:
    """Takes the id from the request message where it has a good one, else mints one."""
    given = getattr(request, "request_id", "")
    _request_id.set(given if is_request_id(given) else new_id())
