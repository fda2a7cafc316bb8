"""Errors as Anthropic's clients know them: ``{"type": "error", "error": {"type", "message"}}``."""

from __future__ import annotations

import msgspec
from starlette.responses import Response

from octavo.server.errors import describe, error_response, retry_headers

PATH = "/v1/messages"  # and what is under it

_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}


def is_messages_path(path: str) -> bool:
    return path == PATH or path.startswith(PATH + "/")


def anthropic_body(message: str, status: int) -> bytes:
    kind = _TYPES.get(status, "api_error" if status >= 500 else "invalid_request_error")
    return msgspec.json.encode({"type": "error", "error": {"type": kind, "message": message}})


def anthropic_response(message: str, status: int, headers: dict[str, str] | None = None) -> Response:
    return Response(anthropic_body(message, status), status_code=status, headers=headers, media_type="application/json")


def anthropic_refusal(error: BaseException) -> Response:
    """The answer to a request that failed before anything was said."""
    message, status, _, _ = describe(error)
    retry_after = getattr(error, "retry_after", None)
    return anthropic_response(message, status, None if retry_after is None else retry_headers(retry_after))


def refusal_for(path: str, message: str, status: int, *, code: str | None = None, headers: dict[str, str] | None = None) -> Response:
    """An error in the shape that clients of ``path`` know, for what is refused before its endpoint."""
    if is_messages_path(path):
        return anthropic_response(message, status, headers)
    return error_response(message, status, code=code, headers=headers)


def anthropic_last_words(error: BaseException) -> bytes:
    """The last event of a stream that fails."""
    message, status, _, _ = describe(error)
    return b"event: error\ndata: " + anthropic_body(message, status) + b"\n\n"
