"""A SERVER span and a duration per HTTP request, as gRPC calls have them."""

import time

from opentelemetry import trace
from opentelemetry.trace import SpanKind, Status, StatusCode
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from epd.rpc.request_context import begin_call, request_id
from epd.telemetry import semconv
from epd.telemetry.metrics import histogram
from epd.telemetry.propagation import extract_context
from epd.telemetry.setup import Telemetry

#: What is told of a request that ended before its status was known.
_CLIENT_GONE = 499
#: A client may invent others: each would be a time series of its own, for ever.
_METHODS = frozenset({"GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"})
_OTHER_METHOD = "_OTHER"


class HttpTelemetry:
    """ASGI middleware. Only the given paths are traced: probes and scrapes belong to no request.

    Args:
        app: What answers.
        telemetry: The service's.
        routes: Paths that generate.
    """

    def __init__(self, app: ASGIApp, telemetry: Telemetry, routes: frozenset[str]) -> None:
        self._app = app
        self._tracer = telemetry.tracer
        self._duration = histogram(telemetry.meter, semconv.HTTP_SERVER_REQUEST_DURATION)
        self._routes = routes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serves one request."""
        if scope["type"] != "http" or scope["path"] not in self._routes:
            await self._app(scope, receive, send)
            return
        begin_call(None)
        route = scope["path"]
        method = scope["method"] if scope["method"] in _METHODS else _OTHER_METHOD
        started_ns = time.monotonic_ns()
        status = _CLIENT_GONE

        async def noting(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                message["headers"] = [
                    *message.get("headers", ()),
                    (b"x-request-id", request_id().encode()),
                ]
            await send(message)

        span = self._tracer.start_span(
            f"{method} {route}",
            context=extract_context(
                (name.decode("latin-1"), value.decode("latin-1"))
                for name, value in scope["headers"]
            ),
            kind=SpanKind.SERVER,
            attributes={
                semconv.HTTP_REQUEST_METHOD: method,
                semconv.HTTP_ROUTE: route,
                semconv.EPD_REQUEST_ID: request_id(),
            },
        )
        try:
            with trace.use_span(span, record_exception=False, set_status_on_exception=False):
                await self._app(scope, receive, noting)
        finally:
            attributes = {
                semconv.HTTP_REQUEST_METHOD: method,
                semconv.HTTP_ROUTE: route,
                semconv.HTTP_RESPONSE_STATUS_CODE: status,
            }
            span.set_attribute(semconv.HTTP_RESPONSE_STATUS_CODE, status)
            if status >= 500:
                span.set_status(Status(StatusCode.ERROR))
            span.end()
            self._duration.record((time.monotonic_ns() - started_ns) / 1e9, attributes)
