"""Which role may call what on a worker, and the interceptor that holds callers to it."""

import contextlib
import functools
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from typing import Any

import grpc

from epd.errors import PermissionDeniedError
from epd.rpc.aliases import RpcMethodHandler, ServicerContext
from epd.rpc.handlers import wrap_handler
from epd.rpc.roles import DECODE, ENCODER, OPERATOR, PREFILL, ROUTER, roles_of

Continuation = Callable[[grpc.HandlerCallDetails], Awaitable[RpcMethodHandler]]

#: Roles whose calls are checked. The router's callers are clients: API keys tell them apart.
WORKERS = frozenset({ENCODER, PREFILL, DECODE})
#: Whoever has a certificate at all may call these.
_OPEN = ("grpc.health.v1.Health/", "grpc.reflection.v1alpha.ServerReflection/")
_SEES_WORKERS = frozenset({ROUTER, OPERATOR})

#: Callers by method; what is not here nobody may call.
CALLERS: Mapping[str, frozenset[str]] = {
    "epd.v1.EncoderService/Encode": frozenset({ROUTER}),
    "epd.v1.EncoderService/AwaitReady": frozenset({PREFILL}),
    "epd.v1.EncoderService/Renew": frozenset({ROUTER, PREFILL}),
    "epd.v1.EncoderService/Release": frozenset({ROUTER, PREFILL}),
    "epd.v1.PrefillService/Prefill": frozenset({ROUTER}),
    "epd.v1.DecodeService/Pair": frozenset({PREFILL}),
    "epd.v1.DecodeService/Announce": frozenset({PREFILL}),
    "epd.v1.DecodeService/Renew": frozenset({PREFILL}),
    "epd.v1.DecodeService/Fail": frozenset({PREFILL}),
    "epd.v1.DecodeService/Settle": frozenset({PREFILL}),
    "epd.v1.DecodeService/Decode": frozenset({ROUTER}),
    "epd.v1.WorkerService/GetInfo": _SEES_WORKERS,
    "epd.v1.WorkerService/WatchLoad": _SEES_WORKERS,
    "epd.v1.WorkerService/WatchKvEvents": frozenset({ROUTER}),
}


def check_caller(method: str, roles: frozenset[str]) -> None:
    """Lets a caller with these roles pass; ``method`` has no leading slash.

    Raises:
        PermissionDeniedError: none of them may call the method.
    """
    if method.startswith(_OPEN) or CALLERS.get(method, frozenset()) & roles:
        return
    shown = ", ".join(sorted(roles)) or "no role"
    raise PermissionDeniedError(
        f"the caller's certificate names {shown}, which may not call {method}",
        reason="ROLE_NOT_ALLOWED",
    )


class AccessInterceptor(grpc.aio.ServerInterceptor):  # type: ignore[type-arg]
    """Checks every call by the certificate of its connection. Belongs inside the errors' one."""

    async def intercept_service(
        self, continuation: Continuation, details: grpc.HandlerCallDetails
    ) -> RpcMethodHandler:
        """Wraps every handler."""
        handler = await continuation(details)
        method = details.method.removeprefix("/")
        return handler and wrap_handler(handler, functools.partial(self._call, method))

    @contextlib.asynccontextmanager
    async def _call(
        self, method: str, request: Any, context: ServicerContext
    ) -> AsyncIterator[None]:
        names = context.auth_context().get("x509_subject_alternative_name", ())
        check_caller(method, roles_of(name.decode("utf-8", "replace") for name in names))
        yield
