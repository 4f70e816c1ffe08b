"""Errors in the shape that OpenAI's clients read."""

from typing import Any

from starlette.responses import JSONResponse

from epd.errors import (
    EpdError,
    InternalError,
    InvalidRequestError,
    RetryableError,
    UnsupportedFeatureError,
)
from epd.rpc.status import INTERNAL_TEXT

#: HTTP status by gRPC status. OpenAI's clients retry 409, 429 and everything from 500 on.
_HTTP_STATUS = {
    "INVALID_ARGUMENT": 400,
    "UNIMPLEMENTED": 400,
    "UNAUTHENTICATED": 401,
    "NOT_FOUND": 404,
    "ALREADY_EXISTS": 409,
    "RESOURCE_EXHAUSTED": 429,
    "CANCELLED": 499,
    "UNAVAILABLE": 503,
    "ABORTED": 503,
    "FAILED_PRECONDITION": 503,
    "DEADLINE_EXCEEDED": 504,
}
_STATUS_OF_REASON = {"MODEL_NOT_SERVED": 404, "SLOW_BODY": 408, "BODY_TOO_LARGE": 413}
#: Where OpenAI has a code of its own for a reason.
_CODES = {"MODEL_NOT_SERVED": "MODEL_NOT_FOUND"}
#: The router's own paths of fields that have another name here.
_FIELD_NAMES = {
    "conversation": "messages",
    "conversation.messages": "messages",
    "text_prompt": "prompt",
    "token_prompt.token_ids": "prompt",
    "input": "messages",
    "sampling.constraint": "response_format",
}


def http_status(error: EpdError) -> int:
    """The status of an answer that is nothing but this error."""
    return _STATUS_OF_REASON.get(error.reason) or _HTTP_STATUS.get(error.code, 500)


def error_body(error: EpdError) -> dict[str, Any]:
    """``{"error": {...}}``. Of an internal error nothing but a fixed text is told."""
    internal = isinstance(error, InternalError)
    return error_shape(
        http_status(error),
        INTERNAL_TEXT if internal else error.message,
        code=InternalError.default_reason if internal else _CODES.get(error.reason, error.reason),
        param=_param(error),
    )


def error_shape(
    status: int, message: str, *, code: str, param: str | None = None
) -> dict[str, Any]:
    """The same for what is no EpdError, such as an unknown path."""
    kind = "invalid_request_error" if status < 500 else "server_error"
    if status == 429:
        kind = "rate_limit_error"
    return {
        "error": {"message": message, "type": kind, "param": param, "code": code.lower()},
    }


def error_response(error: EpdError) -> JSONResponse:
    """The whole answer, with Retry-After (whole seconds) where it helps."""
    headers = {}
    if isinstance(error, RetryableError):
        headers["retry-after"] = str(max(1, round(error.retry_after_s)))
    return JSONResponse(error_body(error), http_status(error), headers)


def _param(error: EpdError) -> str | None:
    if isinstance(error, UnsupportedFeatureError):
        return error.metadata.get("field")
    if not isinstance(error, InvalidRequestError):
        return None
    return _FIELD_NAMES.get(error.field, error.field.removeprefix("sampling.")) or None
