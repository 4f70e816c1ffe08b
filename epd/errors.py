"""Errors that may reach a client: each names its gRPC status, a stable reason and what helps.

Plain Python: the engine and the data plane raise these without knowing gRPC. The errors
interceptor in ``epd.rpc`` turns them into statuses with ``google.rpc`` details; everything else
becomes INTERNAL with a fixed text.
"""

from collections.abc import Mapping
from typing import ClassVar

ERROR_DOMAIN = "epd.v1"


class EpdError(Exception):
    """Base of all errors with a status.

    Args:
        message: For people; carries no prompt text and no secret.
        reason: UPPER_SNAKE, stable, for programs (``google.rpc.ErrorInfo.reason``).
        metadata: Small lowerCamel-keyed facts for programs.
    """

    #: Name of the ``grpc.StatusCode`` member.
    code: ClassVar[str] = "INTERNAL"
    default_reason: ClassVar[str] = "INTERNAL"

    def __init__(
        self,
        message: str,
        *,
        reason: str | None = None,
        metadata: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.reason = reason or self.default_reason
        self.metadata = dict(metadata or {})


class InvalidRequestError(EpdError):
    """The request itself is wrong; ``field`` is the path of the offending field."""

    code = "INVALID_ARGUMENT"
    default_reason = "INVALID_REQUEST"

    def __init__(
        self,
        message: str,
        *,
        field: str,
        reason: str | None = None,
        metadata: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message, reason=reason, metadata=metadata)
        self.field = field


class UnsupportedFeatureError(EpdError):
    """The model or this build lacks what was asked for."""

    code = "UNIMPLEMENTED"
    default_reason = "UNSUPPORTED_FEATURE"


class DuplicateRequestError(EpdError):
    """A live request has the same id."""

    code = "ALREADY_EXISTS"
    default_reason = "DUPLICATE_REQUEST_ID"


class UnauthenticatedError(EpdError):
    """The caller shows no valid API key."""

    code = "UNAUTHENTICATED"
    default_reason = "UNAUTHENTICATED"


class PermissionDeniedError(EpdError):
    """The caller is known and may not do this; the message names both."""

    code = "PERMISSION_DENIED"
    default_reason = "PERMISSION_DENIED"


class NotFoundError(EpdError):
    """A handle, lease or transfer is unknown, expired or of an earlier process start."""

    code = "NOT_FOUND"
    default_reason = "NOT_FOUND"


class LayoutMismatchError(EpdError):
    """Two workers do not fit together; the message names both values."""

    code = "FAILED_PRECONDITION"
    default_reason = "LAYOUT_MISMATCH"


class TransportMismatchError(LayoutMismatchError):
    """Two workers have no transport in common; the message names both lists."""

    default_reason = "TRANSPORT_MISMATCH"


class RetryableError(EpdError):
    """Base of errors that carry RetryInfo: ``retry_after_s`` seconds from now it may work."""

    def __init__(
        self,
        message: str,
        *,
        reason: str | None = None,
        metadata: Mapping[str, str] | None = None,
        retry_after_s: float = 1.0,
    ) -> None:
        super().__init__(message, reason=reason, metadata=metadata)
        self.retry_after_s = retry_after_s


class ResourceExhaustedError(RetryableError):
    """A queue is full, memory is short or a peer is at its cap."""

    code = "RESOURCE_EXHAUSTED"
    default_reason = "RESOURCE_EXHAUSTED"


class UnavailableError(RetryableError):
    """Draining, no healthy worker, or a worker was lost."""

    code = "UNAVAILABLE"
    default_reason = "UNAVAILABLE"


class TransferFailedError(EpdError):
    """KV or an embedding could not be moved; the message names hop and layer."""

    code = "ABORTED"
    default_reason = "TRANSFER_FAILED"


class NotPostedError(TransferFailedError):
    """Nothing of the transfer was sent: the connection with the peer is as good as before."""


class UnknownMemoryError(NotPostedError):
    """The peer has registered no such memory."""


class DataLossError(EpdError):
    """Moved bytes are not the bytes that were sent."""

    code = "DATA_LOSS"
    default_reason = "CHECKSUM_MISMATCH"


class DeadlineExceededError(EpdError):
    """A deadline or a bounded wait has passed."""

    code = "DEADLINE_EXCEEDED"
    default_reason = "DEADLINE_EXCEEDED"


class RequestCancelledError(EpdError):
    """The caller went away or asked to stop."""

    code = "CANCELLED"
    default_reason = "CANCELLED"


class InternalError(EpdError):
    """A bug. Clients see a fixed text, the log sees this one."""
