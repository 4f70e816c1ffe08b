"""One request's answer on its way to an HTTP client, whole or as a stream of events."""

import asyncio
import contextlib
import json
from collections.abc import AsyncGenerator, AsyncIterator, Coroutine
from typing import Any, TypeVar

from starlette.requests import ClientDisconnect
from starlette.responses import JSONResponse, Response
from starlette.types import Receive, Scope, Send

from epd.cleanup import cancel_and_wait
from epd.errors import RequestCancelledError
from epd.rpc.server_interceptors import typed_error
from epd.rpc.status import root_error
from services.router.calls import Completion, Delta
from services.router.http.answers import AnswerFormat, Collected
from services.router.http.errors import error_body
from services.router.http.stream_options import StreamOptions

T = TypeVar("T")
#: Deltas and completions of all choices, each with its choice's index.
ChoiceEvents = AsyncGenerator[tuple[int, Delta | Completion], None]

_DONE = b"data: [DONE]\n\n"


async def unless_gone(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """The work's result; a client that disconnects meanwhile cancels it.

    Raises:
        ClientDisconnect: nobody waits for the result any more.
    """
    task = asyncio.ensure_future(work)
    gone = asyncio.ensure_future(_disconnected(receive))
    try:
        await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        raise ClientDisconnect
    finally:
        await cancel_and_wait(task, gone)


async def whole_answer(events: ChoiceEvents, answer: AnswerFormat) -> JSONResponse:
    """Reads all choices to their ends.

    Raises:
        EpdError: why a choice has failed.
    """
    deltas: dict[int, list[Delta]] = {}
    completions: dict[int, Completion] = {}
    async with contextlib.aclosing(events):
        async for index, event in events:
            if isinstance(event, Completion):
                completions[index] = event
            else:
                deltas.setdefault(index, []).append(event)
    choices = [
        Collected(_joined(deltas.get(index, [])), completions[index])
        for index in sorted(completions)
    ]
    return JSONResponse(answer.whole(choices))


class EventStream(Response):
    """Server-sent events: a chunk per delta, then ``[DONE]``.

    An error after the first token can change the status no more: it is an event of its own, which
    OpenAI's clients raise, and no ``[DONE]`` follows.

    Args:
        events: Owned by the response from its making on.
        first: Their first, already read: by then most errors have shown.
        answer: The shape of the chunks.
        options: Of the stream.
        send_timeout_s: Longest wait for a client that reads nothing.
    """

    def __init__(
        self,
        events: ChoiceEvents,
        first: tuple[int, Delta | Completion],
        answer: AnswerFormat,
        options: StreamOptions,
        send_timeout_s: float,
    ) -> None:
        self.status_code = 200
        self.background = None
        self.media_type = "text/event-stream"
        self.init_headers({"cache-control": "no-cache", "x-accel-buffering": "no"})
        self._events = events
        self._first = first
        self._answer = answer
        self._options = options
        self._send_timeout_s = send_timeout_s

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Sends everything; a client that goes away ends the request everywhere."""
        async with contextlib.aclosing(self._events):
            with contextlib.suppress(ClientDisconnect):
                await unless_gone(receive, self._send_all(scope["path"], send))

    async def _send_all(self, path: str, send: Send) -> None:
        start = {"type": "http.response.start", "status": 200, "headers": self.raw_headers}
        await self._bounded(send, start)
        async with contextlib.aclosing(self._chunks(path)) as chunks:
            async for chunk in chunks:
                body = {"type": "http.response.body", "body": chunk, "more_body": True}
                await self._bounded(send, body)
        await self._bounded(send, {"type": "http.response.body", "body": b"", "more_body": False})

    async def _bounded(self, send: Send, message: dict[str, Any]) -> None:
        try:
            async with asyncio.timeout(self._send_timeout_s):
                await send(message)
        except TimeoutError:
            raise RequestCancelledError(
                f"the client has read nothing for {self._send_timeout_s:g} s"
            ) from None

    async def _chunks(self, path: str) -> AsyncGenerator[bytes, None]:
        begun: set[int] = set()
        completions: dict[int, Completion] = {}
        try:
            async for index, event in self._all_events():
                if index not in begun:
                    begun.add(index)
                    if (beginning := self._answer.begin(index)) is not None:
                        yield self._line(beginning)
                if isinstance(event, Completion):
                    completions[index] = event
                    yield self._line(self._answer.end(index, event))
                elif (chunk := self._answer.delta(index, event)) is not None:
                    yield self._line(chunk)
        except Exception as raised:
            yield _event(error_body(typed_error(root_error(raised), path)))
            return
        if self._options.include_usage:
            ordered = [completions[index] for index in sorted(completions)]
            yield _event(self._answer.usage_chunk(ordered))
        yield _DONE

    async def _all_events(self) -> AsyncIterator[tuple[int, Delta | Completion]]:
        yield self._first
        async for event in self._events:
            yield event

    def _line(self, chunk: dict[str, Any]) -> bytes:
        return _event({**chunk, "usage": None} if self._options.include_usage else chunk)


def _event(value: dict[str, Any]) -> bytes:
    return b"data: " + json.dumps(value, ensure_ascii=False).encode() + b"\n\n"


def _joined(deltas: list[Delta]) -> Delta:
    return Delta(
        [token for delta in deltas for token in delta.token_ids],
        "".join(delta.text for delta in deltas),
        [value for delta in deltas for value in delta.logprobs],
        [top for delta in deltas for top in delta.top_logprobs],
    )


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
