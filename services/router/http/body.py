"""Request bodies: read within bounds, decoded off the event loop when they are large."""

import asyncio
from collections.abc import Callable
from typing import Any, TypeVar

from starlette.requests import ClientDisconnect, Request

from epd.errors import InvalidRequestError, RequestCancelledError, ResourceExhaustedError
from services.router.http.strict_json import read_json

T = TypeVar("T")
#: A smaller body is decoded in well under a millisecond.
_INLINE_BYTES = 16 << 10


class BodyReader:
    """Reads bodies.

    Args:
        max_bytes: Most bytes of one body.
        max_live_bytes: Most bytes of all bodies that are being read or decoded.
        timeout_s: Longest time for a body to arrive.
    """

    def __init__(self, max_bytes: int, max_live_bytes: int, timeout_s: float) -> None:
        self._max_bytes = max_bytes
        self._max_live_bytes = max_live_bytes
        self._timeout_s = timeout_s
        self._live_bytes = 0

    async def read(self, request: Request, convert: Callable[[Any], T]) -> T:
        """The body's JSON, converted.

        Raises:
            InvalidRequestError: too large, too slow, or not JSON.
            ResourceExhaustedError: too many large bodies at once.
            EpdError: what ``convert`` raises.
        """
        chunks: list[bytes] = []
        size = 0
        try:
            async with asyncio.timeout(self._timeout_s):
                async for chunk in request.stream():
                    size += len(chunk)
                    self._live_bytes += len(chunk)
                    chunks.append(chunk)
                    self._check(size)
            body = b"".join(chunks)
            if size <= _INLINE_BYTES:
                return convert(_decode(body))
            return await asyncio.to_thread(lambda: convert(_decode(body)))
        except TimeoutError:
            raise InvalidRequestError(
                f"the body did not arrive within {self._timeout_s:g} s",
                field="",
                reason="SLOW_BODY",
            ) from None
        except ClientDisconnect:
            raise RequestCancelledError("the client went away") from None
        finally:
            self._live_bytes -= size

    def _check(self, size: int) -> None:
        if size > self._max_bytes:
            raise InvalidRequestError(
                f"the body has more than {self._max_bytes} bytes", field="", reason="BODY_TOO_LARGE"
            )
        if self._live_bytes > self._max_live_bytes:
            raise ResourceExhaustedError(
                f"bodies of more than {self._max_live_bytes} bytes are being read",
                reason="ROUTER_FULL",
            )


def _decode(body: bytes) -> Any:
    try:
        return read_json(body)
    except ValueError as error:
        raise InvalidRequestError("the body is no JSON", field="", reason="NOT_JSON") from error
