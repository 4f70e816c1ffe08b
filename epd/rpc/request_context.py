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


def begin_call(request: Any) -> None:
    """Takes the id from the request message where it has one, else mints one.

    Of one that is longer than allowed only the beginning, for the answer that refuses it.
    """
    _request_id.set(getattr(request, "request_id", "")[:MAX_ID_LENGTH] or new_id())
