"""Puts code around RPC handlers of all four arities, and lets services join a running server."""

import contextlib
import inspect
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from typing import Any

import grpc

from epd.errors import UnavailableError
from epd.rpc.aliases import GenericRpcHandler, RpcMethodHandler, ServicerContext
from epd.rpc.sending import written
from epd.rpc.status import abort

#: Enters before the handler and leaves after it; gets the request message, None for a stream.
Around = Callable[[Any, ServicerContext], contextlib.AbstractAsyncContextManager[None]]


def wrap_handler(handler: RpcMethodHandler, around: Around) -> RpcMethodHandler:
    """The same handler with ``around`` about each call."""
    inner, make = _behaviour(handler)

    if inspect.isasyncgenfunction(inner):
        # Not a generator itself: gRPC leaves the generator of a cancelled call to the garbage
        # collector, which closes it some time later and outside its context.
        async def stream(request: Any, context: ServicerContext) -> None:
            message = None if handler.request_streaming else request
            async with around(message, context), contextlib.aclosing(inner(request, context)) as it:
                async for response in it:
                    await written(context.write(response))

        outer: Callable[..., Any] = stream
    else:
        # Unary answers, and streams that answer by context.write (grpc's own Health/Watch).
        async def call(request: Any, context: ServicerContext) -> Any:
            async with around(None if handler.request_streaming else request, context):
                return await inner(request, context)

        outer = call
    wrapped: RpcMethodHandler = make(
        outer,
        request_deserializer=handler.request_deserializer,
        response_serializer=handler.response_serializer,
    )
    return wrapped


def _behaviour(handler: Any) -> tuple[Callable[..., Any], Callable[..., Any]]:
    kind = (bool(handler.request_streaming), bool(handler.response_streaming))
    return {
        (False, False): (handler.unary_unary, grpc.unary_unary_rpc_method_handler),
        (False, True): (handler.unary_stream, grpc.unary_stream_rpc_method_handler),
        (True, False): (handler.stream_unary, grpc.stream_unary_rpc_method_handler),
        (True, True): (handler.stream_stream, grpc.stream_stream_rpc_method_handler),
    }[kind]


class LateHandlers(GenericRpcHandler):
    """Handlers that are added while the server already answers health checks.

    gRPC allows no handler after the start of a server, yet health must be answered while weights
    load. This one is registered before the start and filled later; until then calls of the named
    services get UNAVAILABLE. It stands in for the server in ``add_…Servicer_to_server``.
    """

    def __init__(self, service_names: Iterable[str]) -> None:
        self._service_names = frozenset(service_names)
        self._handlers: list[GenericRpcHandler] = []

    def add_generic_rpc_handlers(self, handlers: Iterable[GenericRpcHandler]) -> None:
        """Called by generated code."""
        self._handlers.extend(handlers)

    def add_registered_method_handlers(self, service_name: str, handlers: Any) -> None:
        """Called by generated code with what :meth:`add_generic_rpc_handlers` has got already."""

    def service(self, details: grpc.HandlerCallDetails) -> RpcMethodHandler | None:
        """The handler of a call; None makes gRPC answer UNIMPLEMENTED."""
        for handler in self._handlers:
            found = handler.service(details)
            if found is not None:
                return found
        if not self._handlers and details.method.split("/")[1] in self._service_names:
            return grpc.stream_stream_rpc_method_handler(_refuse)
        return None


async def _refuse(requests: Awaitable[Any], context: ServicerContext) -> AsyncIterator[Any]:
    await abort(context, UnavailableError("still starting", reason="STARTING"), request_id="")
    yield  # makes this a generator; never reached
