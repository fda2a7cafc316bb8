"""Errors as OpenAI's clients know them: ``{"error": {"message", "type", "param", "code"}}``, for every way to fail."""

from __future__ import annotations

import logging
import math
import re
from collections.abc import Mapping

import msgspec
from starlette.responses import Response

from octavo.errors import EngineDeadError, OctavoError, RequestError

logger = logging.getLogger("octavo.server")

INVALID_REQUEST = "invalid_request_error"
SERVER_ERROR = "server_error"
RATE_LIMIT = "rate_limit_error"


class ErrorDetail(msgspec.Struct):
    message: str
    type: str
    param: str | None = None
    code: str | None = None


class ErrorBody(msgspec.Struct):
    error: ErrorDetail


def error_body(message: str, status: int, *, param: str | None = None, code: str | None = None) -> bytes:
    """The JSON bytes of an error object; ``type`` follows from the status."""
    kind = SERVER_ERROR if status >= 500 else RATE_LIMIT if status == 429 else INVALID_REQUEST
    return msgspec.json.encode(ErrorBody(ErrorDetail(message, kind, param, code)))


def error_response(
    message: str, status: int, *, param: str | None = None, code: str | None = None, headers: dict[str, str] | None = None
) -> Response:
    body = error_body(message, status, param=param, code=code)
    return Response(body, status_code=status, headers=headers, media_type="application/json")


def describe(error: BaseException) -> tuple[str, int, str | None, str | None]:
    """(message, HTTP status, param, code) of any exception.

    Only errors made for the user show their message; the details of a fault of ours go to the log.
    """
    if isinstance(error, RequestError):
        return str(error), error.status, error.param, error.code
    if isinstance(error, EngineDeadError):
        return f"The engine is not running: {error}", 503, None, "engine_dead"
    if isinstance(error, OctavoError):
        return str(error), 500, None, "engine_error"
    logger.error("Internal error while serving a request", exc_info=error)
    return f"Internal server error ({type(error).__name__}); the server's log has the details.", 500, None, "internal_error"


def renamed(error: RequestError, names: Mapping[str, str]) -> RequestError:
    """``error`` with the names that fields have on another route. ``names``: chat's -> the route's; longer ones come first."""

    def rename(text: str) -> str:
        for old, new in names.items():
            if re.match(re.escape(old) + r"(?!\w)", text):
                return new + text[len(old) :]
        return text

    param = None if error.param is None else rename(error.param)
    return RequestError(rename(str(error)), param=param, status=error.status, code=error.code, retry_after=error.retry_after)


def response_for(error: BaseException) -> Response:
    message, status, param, code = describe(error)
    retry_after = getattr(error, "retry_after", None)
    headers = None if retry_after is None else retry_headers(retry_after)
    return error_response(message, status, param=param, code=code, headers=headers)


def retry_headers(seconds: float) -> dict[str, str]:
    """Retry-After takes whole seconds; OpenAI's clients also read milliseconds."""
    return {"Retry-After": str(max(1, math.ceil(seconds))), "Retry-After-Ms": str(max(1, math.ceil(1000 * seconds)))}


def body_for(error: BaseException) -> bytes:
    """The error object of an exception, for an SSE error event."""
    message, status, param, code = describe(error)
    return error_body(message, status, param=param, code=code)
