"""HTTP/1.1 connections that end when their client sends nothing, or only bit by bit."""

import asyncio
from typing import Any

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol


class BoundedProtocol(H11Protocol):
    """uvicorn's protocol with a bound on two waits that it has none for.

    It would wait for ever for the head of a request, and for the rest of a body whose request is
    answered already. Such connections take places, and who needs no key for it could take them all.

    Args:
        head_timeout_s: Longest such wait.
        uvicorn: What uvicorn gives to every protocol.
    """

    def __init__(self, head_timeout_s: float, **uvicorn: Any) -> None:
        super().__init__(**uvicorn)
        self._head_timeout_s = head_timeout_s
        self._patience: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """The client has so long for its first request's head."""
        super().connection_made(transport)
        self._bound()

    def data_received(self, data: bytes) -> None:
        """What has come may be all that was waited for."""
        super().data_received(data)
        self._bound()

    def connection_lost(self, exc: Exception | None) -> None:
        """Nothing is waited for any more."""
        super().connection_lost(exc)
        self._end_patience()

    def _bound(self) -> None:
        """Starts the wait's bound, or ends it. More of the same starts no new one."""
        theirs = self.conn.their_state
        answered = self.cycle is not None and self.cycle.response_complete
        if theirs is not h11.IDLE and not (answered and theirs is h11.SEND_BODY):
            self._end_patience()
        elif self._patience is None:
            self._patience = self.loop.call_later(self._head_timeout_s, self.transport.close)

    def _end_patience(self) -> None:
        if self._patience is not None:
            self._patience.cancel()
            self._patience = None
