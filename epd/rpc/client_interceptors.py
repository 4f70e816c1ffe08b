"""Client interceptors: a CLIENT span and a duration per call, the trace context in its metadata."""

import asyncio
import contextlib
import functools
import time
from collections.abc import Iterator, Mapping
from typing import Any

import grpc
from opentelemetry import trace
from opentelemetry.trace import Span, SpanKind, Status, StatusCode

from epd.rpc.credentials import split_address
from epd.rpc.status_name import status_name_to
from epd.rpc.tracing_policy import is_traced
from epd.telemetry import semconv
from epd.telemetry.metrics import histogram
from epd.telemetry.propagation import inject_context
from epd.telemetry.setup import Telemetry


def client_interceptors(telemetry: Telemetry, address: str) -> list[Any]:
    """One interceptor per arity: gRPC takes an object for the first arity it implements only.

    None for streams of requests. They are kept open for many requests and belong to none, and an
    intercepted one leaves tasks behind when its peer dies.
    """
    tracing = CallTracing(telemetry, address)
    return [_UnaryUnary(tracing), _UnaryStream(tracing)]


class CallTracing:
    """A CLIENT span and a duration per call of one peer."""

    def __init__(self, telemetry: Telemetry, address: str) -> None:
        self._tracer = telemetry.tracer
        self._duration = histogram(telemetry.meter, semconv.RPC_CLIENT_CALL_DURATION)
        host, port = split_address(address)
        self._peer: dict[str, str | int] = {semconv.SERVER_ADDRESS: host, semconv.SERVER_PORT: port}
        # The loop keeps weak references only.
        self._finishing: set[asyncio.Task[None]] = set()

    async def intercept(self, continuation: Any, details: Any, request: Any) -> Any:
        """Starts the call and has its end recorded; adds nothing where the policy says so."""
        method = details.method
        method = (method.decode() if isinstance(method, bytes) else method).removeprefix("/")
        if not is_traced(method):
            return await continuation(details, request)
        span = self._start_span(method)
        metadata = grpc.aio.Metadata(*(details.metadata or ()))
        for key, value in inject_context(trace.set_span_in_context(span)):
            metadata.add(key, value)
        started_ns = time.monotonic_ns()
        try:
            call = await continuation(details._replace(metadata=metadata), request)
        except BaseException:
            span.end()
            raise
        task = asyncio.create_task(self._finish(call, method, span, started_ns))
        self._finishing.add(task)
        task.add_done_callback(self._finishing.discard)
        return call

    @contextlib.contextmanager
    def message(self, method: str) -> Iterator[Mapping[str, str]]:
        """Around the wait for an answer to a message that stands for a call of ``method``, on a
        stream that is kept. Yields the trace context's headers, to be sent along.
        """
        span, started_ns = self._start_span(method), time.monotonic_ns()
        with status_name_to(functools.partial(self._end, method, span, started_ns)):
            yield dict(inject_context(trace.set_span_in_context(span)))

    def _start_span(self, method: str) -> Span:
        if not trace.get_current_span().get_span_context().is_valid:
            return trace.INVALID_SPAN  # upkeep of no request: begins no trace
        return self._tracer.start_span(
            method,
            kind=SpanKind.CLIENT,
            attributes=self._attributes(method),
        )

    def _attributes(self, method: str) -> dict[str, str | int]:
        return {semconv.RPC_SYSTEM_NAME: "grpc", semconv.RPC_METHOD: method, **self._peer}

    async def _finish(self, call: Any, method: str, span: Span, started_ns: int) -> None:
        code = "CANCELLED"
        try:
            with contextlib.suppress(asyncio.CancelledError):
                code = (await call.code()).name
        finally:
            self._end(method, span, started_ns, code)

    def _end(self, method: str, span: Span, started_ns: int, code: str) -> None:
        attributes = self._attributes(method)
        attributes[semconv.RPC_RESPONSE_STATUS_CODE] = code
        span.set_attribute(semconv.RPC_RESPONSE_STATUS_CODE, code)
        if code != "OK":
            attributes[semconv.ERROR_TYPE] = code
            span.set_attribute(semconv.ERROR_TYPE, code)
            span.set_status(Status(StatusCode.ERROR))
        span.end()
        self._duration.record((time.monotonic_ns() - started_ns) / 1e9, attributes)


class _UnaryUnary(grpc.aio.UnaryUnaryClientInterceptor):  # type: ignore[type-arg]
    def __init__(self, tracing: CallTracing) -> None:
        self._tracing = tracing

    async def intercept_unary_unary(self, continuation: Any, details: Any, request: Any) -> Any:
        return await self._tracing.intercept(continuation, details, request)


class _UnaryStream(grpc.aio.UnaryStreamClientInterceptor):  # type: ignore[type-arg]
    def __init__(self, tracing: CallTracing) -> None:
        self._tracing = tracing

    async def intercept_unary_stream(self, continuation: Any, details: Any, request: Any) -> Any:
        return await self._tracing.intercept(continuation, details, request)
