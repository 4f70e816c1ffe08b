"""EpdError to gRPC status with google.rpc details, and back."""

from collections.abc import Mapping

import grpc
from google.protobuf import any_pb2, duration_pb2
from google.protobuf.message import DecodeError
from google.rpc import code_pb2, error_details_pb2, status_pb2
from grpc_status import rpc_status

from epd.errors import (
    ERROR_DOMAIN,
    DataLossError,
    DeadlineExceededError,
    DuplicateRequestError,
    EpdError,
    InternalError,
    InvalidRequestError,
    LayoutMismatchError,
    NotFoundError,
    PermissionDeniedError,
    RequestCancelledError,
    ResourceExhaustedError,
    RetryableError,
    TransferFailedError,
    UnauthenticatedError,
    UnavailableError,
    UnsupportedFeatureError,
)
from epd.rpc.aliases import ServicerContext
from epd.rpc.connection_failure import connection_failure
from epd.rpc.sending import aborted

INTERNAL_TEXT = "internal error; the service's log tells more under the request id"
#: A client reads 8 KiB of trailing metadata and takes more for RESOURCE_EXHAUSTED. The text of an
#: error, which may quote what the client sent, is in it up to three times, each longer by encoding.
_MAX_TEXT_BYTES = 1024
_MAX_NAME_BYTES = 128
#: Reason of an UNAVAILABLE that gRPC itself made: the peer is gone or never was there.
PEER_UNREACHABLE = "PEER_UNREACHABLE"

_PLAIN_ERRORS: dict[str, type[EpdError]] = {
    kind.code: kind
    for kind in (
        UnsupportedFeatureError,
        DuplicateRequestError,
        UnauthenticatedError,
        PermissionDeniedError,
        NotFoundError,
        LayoutMismatchError,
        TransferFailedError,
        DataLossError,
        DeadlineExceededError,
        RequestCancelledError,
    )
}
_RETRYABLE_ERRORS: dict[str, type[RetryableError]] = {
    kind.code: kind for kind in (ResourceExhaustedError, UnavailableError)
}


def status_from_error(error: EpdError, request_id: str) -> status_pb2.Status:
    """The status a caller sees. An INTERNAL one has a fixed text; nothing of ``error`` leaks."""
    internal = error.code == InternalError.code
    text = _shortened(error.message, _MAX_TEXT_BYTES)
    details = [
        error_details_pb2.ErrorInfo(
            reason=error.default_reason if internal else error.reason,
            domain=ERROR_DOMAIN,
            metadata={} if internal else _short_values(error.metadata),
        ),
        error_details_pb2.RequestInfo(request_id=request_id),
    ]
    match error:
        case InvalidRequestError():
            violation = error_details_pb2.BadRequest.FieldViolation(
                field=_shortened(error.field, _MAX_NAME_BYTES), description=text
            )
            details.append(error_details_pb2.BadRequest(field_violations=[violation]))
        case RetryableError():
            delay = duration_pb2.Duration(nanos=0)
            delay.FromNanoseconds(int(error.retry_after_s * 1e9))
            details.append(error_details_pb2.RetryInfo(retry_delay=delay))
        case LayoutMismatchError():
            mismatch = error_details_pb2.PreconditionFailure.Violation(
                type=error.reason, description=text
            )
            details.append(error_details_pb2.PreconditionFailure(violations=[mismatch]))
        case NotFoundError():
            details.append(error_details_pb2.ResourceInfo(description=text))
    return status_pb2.Status(
        code=code_pb2.Code.Value(error.code),
        message=INTERNAL_TEXT if internal else text,
        details=[_pack(detail) for detail in details],
    )


async def abort(context: ServicerContext, error: EpdError, request_id: str) -> None:
    """Ends a call with an error's status. Never returns: gRPC raises inside."""
    status = rpc_status.to_status(status_from_error(error, request_id))
    # abort_with_status of grpc.aio leaves the status code of server-side spans unset.
    await aborted(context.abort(status.code, status.details, status.trailing_metadata))


def error_from_rpc(error: grpc.aio.AioRpcError) -> EpdError:
    """What a peer answered, as the error it raised; codes of no EpdError become InternalError."""
    code, message = error.code().name, error.details() or error.code().name
    try:
        details = _details(rpc_status.from_call(error))  # type: ignore[arg-type]
    except (ValueError, DecodeError):  # they contradict the status or are none: a foreign server
        details = _details(None)
    reason, metadata, retry_after_s, field = details
    if reason is None and code == UnavailableError.code:
        reason, message = connection_failure(message) or (PEER_UNREACHABLE, message)
    found = error_from_code(code, message, reason, field=field, retry_after_s=retry_after_s)
    found.metadata = metadata
    return found


def error_from_status(status: status_pb2.Status) -> EpdError:
    """The error that :func:`status_from_error` made a status of.

    Raises:
        ValueError, DecodeError: it made no such status.
    """
    reason, metadata, retry_after_s, field = _details(status)
    code = code_pb2.Code.Name(code_pb2.Code.ValueType(status.code))
    found = error_from_code(code, status.message, reason, field=field, retry_after_s=retry_after_s)
    found.metadata = metadata
    return found


def error_from_code(
    code: str,
    message: str,
    reason: str | None,
    *,
    field: str = "",
    retry_after_s: float = 1.0,
) -> EpdError:
    """The error of a status code's name; codes of no EpdError become InternalError."""
    if code == InvalidRequestError.code:
        return InvalidRequestError(message, field=field, reason=reason)
    if code in _RETRYABLE_ERRORS:
        return _RETRYABLE_ERRORS[code](message, reason=reason, retry_after_s=retry_after_s)
    if code in _PLAIN_ERRORS:
        return _PLAIN_ERRORS[code](message, reason=reason)
    return InternalError(f"{code}: {message}", reason=reason)


def root_error(error: BaseException) -> BaseException:
    """The first cause inside an exception group (of a TaskGroup), typed errors before others."""
    if not isinstance(error, BaseExceptionGroup):
        return error
    leaves = [root_error(inner) for inner in error.exceptions]
    typed = [leaf for leaf in leaves if isinstance(leaf, EpdError)]
    return (typed or leaves)[0]


def _details(
    status: status_pb2.Status | None,
) -> tuple[str | None, dict[str, str], float, str]:
    """Reason, metadata, retry delay in seconds and field, as far as the peer gave them."""
    reason: str | None = None
    metadata: dict[str, str] = {}
    retry_after_s, field = 1.0, ""
    for packed in status.details if status is not None else ():
        info = error_details_pb2.ErrorInfo()
        retry = error_details_pb2.RetryInfo()
        bad_request = error_details_pb2.BadRequest()
        if packed.Unpack(info):
            reason, metadata = info.reason, dict(info.metadata)
        elif packed.Unpack(retry):
            retry_after_s = retry.retry_delay.ToNanoseconds() / 1e9
        elif packed.Unpack(bad_request) and bad_request.field_violations:
            field = bad_request.field_violations[0].field
    return reason, metadata, retry_after_s, field


def _shortened(text: str, most_bytes: int) -> str:
    data = text.encode(errors="replace")
    if len(data) <= most_bytes:
        return text
    return data[:most_bytes].decode(errors="ignore") + "..."


def _short_values(metadata: Mapping[str, str]) -> dict[str, str]:
    return {name: _shortened(value, _MAX_NAME_BYTES) for name, value in metadata.items()}


def _pack(message: object) -> any_pb2.Any:
    packed = any_pb2.Any()
    packed.Pack(message)  # type: ignore[arg-type]
    return packed
