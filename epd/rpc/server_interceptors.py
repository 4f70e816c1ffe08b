"""Server interceptors: telemetry outermost, errors inside, so that spans see the mapped status."""

import asyncio
import contextlib
import functools
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import grpc
from opentelemetry import trace

from epd.errors import EpdError, InternalError
from epd.rpc.aliases import RpcMethodHandler, ServerInterceptor, ServicerContext
from epd.rpc.handlers import wrap_handler
from epd.rpc.request_context import begin_call, request_id
from epd.rpc.server_calls import ServerCalls
from epd.rpc.status import abort, error_from_rpc, root_error
from epd.rpc.tracing_policy import is_traced
from epd.telemetry.propagation import extract_context
from epd.telemetry.setup import Telemetry

_log = logging.getLogger(__name__)
Continuation = Callable[[grpc.HandlerCallDetails], Awaitable[RpcMethodHandler]]

#: The caller's clock for a deadline starts earlier than ours, by the way of the request.
DEADLINE_SLACK_S = 0.1


def server_interceptors(telemetry: Telemetry, *, starts_traces: bool) -> list[ServerInterceptor]:
    """Both interceptors in their order; see :class:`TelemetryInterceptor`."""
    return [TelemetryInterceptor(telemetry, starts_traces=starts_traces), ErrorsInterceptor()]


class TelemetryInterceptor(grpc.aio.ServerInterceptor):  # type: ignore[type-arg]
    """A SERVER span and a duration per call; see :class:`ServerCalls`."""

    def __init__(self, telemetry: Telemetry, *, starts_traces: bool) -> None:
        self._calls = ServerCalls(telemetry, starts_traces=starts_traces)

    async def intercept_service(
        self, continuation: Continuation, details: grpc.HandlerCallDetails
    ) -> RpcMethodHandler:
        """Wraps the handler unless the policy leaves its method alone."""
        handler = await continuation(details)
        method = details.method.removeprefix("/")
        if handler is None or not is_traced(method):
            return handler
        return wrap_handler(handler, functools.partial(self._call, method))

    @contextlib.asynccontextmanager
    async def _call(
        self, method: str, request: Any, context: ServicerContext
    ) -> AsyncIterator[None]:
        started_ns = time.monotonic_ns()
        caller = extract_context(context.invocation_metadata() or ())
        span = self._calls.begin(method, caller)
        code = "OK"
        try:
            with trace.use_span(span, record_exception=False, set_status_on_exception=False):
                yield
            code = _code_name(context)
        except grpc.aio.AbortError:
            code = _code_name(context)
            raise
        except (asyncio.CancelledError, GeneratorExit):
            # gRPC cancels the handler in both cases; only the clock tells them apart.
            remaining_s = context.time_remaining()
            overdue = remaining_s is not None and remaining_s <= DEADLINE_SLACK_S
            code = "DEADLINE_EXCEEDED" if overdue else "CANCELLED"
            raise
        except BaseException:
            code = "UNKNOWN"
            raise
        finally:
            self._calls.end(span, method, started_ns, code)


class ErrorsInterceptor(grpc.aio.ServerInterceptor):  # type: ignore[type-arg]
    """Turns what a handler raises into a status; what is no EpdError becomes a silent INTERNAL."""

    async def intercept_service(
        self, continuation: Continuation, details: grpc.HandlerCallDetails
    ) -> RpcMethodHandler:
        """Wraps every handler, those of health and reflection too."""
        handler = await continuation(details)
        return handler and wrap_handler(handler, functools.partial(self._call, details.method))

    @contextlib.asynccontextmanager
    async def _call(
        self, method: str, request: Any, context: ServicerContext
    ) -> AsyncIterator[None]:
        begin_call(request)
        try:
            yield
        except grpc.aio.AbortError:
            raise
        except Exception as raised:
            await abort(context, typed_error(root_error(raised), method), request_id())


def typed_error(error: BaseException, method: str) -> EpdError:
    """What a caller of ``method`` is told; what is no EpdError is logged and becomes internal."""
    if isinstance(error, grpc.aio.AioRpcError):
        error = error_from_rpc(error)
    if isinstance(error, EpdError) and not isinstance(error, InternalError):
        return error
    _log.error("%s failed, request %s", method, request_id(), exc_info=error)
    return error if isinstance(error, InternalError) else InternalError(str(error))


def _code_name(context: ServicerContext) -> str:
    """Name of the status that the handler left; gRPC keeps a number, 0 or None when unset."""
    code = context.code()
    if isinstance(code, grpc.StatusCode):
        return code.name
    names = {member.value[0]: member.name for member in grpc.StatusCode}
    return names.get(code or 0, "UNKNOWN")
