"""Sends on a call whose client may be gone by now."""

import asyncio
import logging
from collections.abc import Awaitable

import grpc

_log = logging.getLogger(__name__)
#: How long after a failed send gRPC may take to cancel the handler.
_CANCEL_S = 2.0


async def sent(sending: Awaitable[None]) -> None:
    """Awaits a write or an abort; a client that is gone is a cancel, not an error.

    gRPC tells it twice: the send fails, and a moment later the handler's task is cancelled. That
    cancellation is what everybody is prepared for, and it must not hit the handler's clean-up.

    Raises:
        asyncio.CancelledError: nothing can be sent on this call any more.
    """
    try:
        await sending
    except grpc.aio.InternalError as error:
        await asyncio.sleep(_CANCEL_S)
        _log.warning("a call cannot be answered, though its client is there: %s", error)
        raise asyncio.CancelledError from error
