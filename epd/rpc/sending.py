"""Sends on a call whose client may be gone by now: that is a cancelled call, not an error."""

import asyncio
import logging
from collections.abc import Awaitable

import grpc

_log = logging.getLogger(__name__)
#: How long after a failed write gRPC may take to cancel the handler.
_CANCEL_S = 2.0


async def written(write: Awaitable[None]) -> None:
    """Awaits a write of a message.

    gRPC tells twice that the client is gone: the write fails, and a moment later the handler's task
    is cancelled. That cancellation is what everybody is prepared for, and it must not hit the
    handler's clean-up.

    Raises:
        asyncio.CancelledError: nothing can be sent on this call any more.
    """
    try:
        await write
    except grpc.aio.InternalError as error:
        await asyncio.sleep(_CANCEL_S)
        _log.warning("a call cannot be answered, though its client is there: %s", error)
        raise asyncio.CancelledError from error


async def aborted(abort: Awaitable[None]) -> None:
    """Awaits the end of a call with a status. After a failure no cancellation comes any more.

    Raises:
        grpc.aio.AbortError: always, as gRPC does.
        asyncio.CancelledError: the status cannot be sent any more.
    """
    try:
        await abort
    except grpc.aio.InternalError as error:
        raise asyncio.CancelledError from error
