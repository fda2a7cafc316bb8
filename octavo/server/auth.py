"""API keys: deny by default, compare in constant time."""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Iterable

from starlette.types import ASGIApp, Receive, Scope, Send

from octavo.server.errors import error_response
from octavo.server.messages_errors import anthropic_response, is_messages_path

OPEN_PATHS = frozenset({"/health", "/ping", "/version", "/docs"})


class ApiKeyMiddleware:
    """Let a request through only with ``Authorization: Bearer KEY``, or Anthropic's ``x-api-key: KEY``, for one of ``keys``, on
    every path but ``open_paths``.

    Works on the path before routing, so a route added later is closed unless it is named here. Keys are compared as
    digests of equal length, and always against all keys: the time taken says nothing about any of them.
    """

    def __init__(self, app: ASGIApp, keys: Iterable[str], open_paths: frozenset[str] = OPEN_PATHS) -> None:
        self.app = app
        self.digests = [_digest(key.encode()) for key in keys]
        self.open_paths = open_paths

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["path"] not in self.open_paths and not self.allows(scope["headers"]):
            message, headers = "Incorrect or missing API key; send it as 'Authorization: Bearer KEY'.", {"WWW-Authenticate": "Bearer"}
            if is_messages_path(scope["path"]):
                response = anthropic_response(message, 401, headers)
            else:
                response = error_response(message, 401, code="invalid_api_key", headers=headers)
            await response(scope, receive, send)
            return
        await self.app(scope, receive, send)

    def allows(self, headers: Iterable[tuple[bytes, bytes]]) -> bool:
        """One header of a kind at most; a client may send both kinds, and one right key is enough."""
        bearers = [value for name, value in headers if name == b"authorization"]
        plain = [value for name, value in headers if name == b"x-api-key"]
        if len(bearers) > 1 or len(plain) > 1:
            return False
        found = False
        for key in (*(_bearer(value) for value in bearers), *plain):
            digest = _digest(key.strip())
            for known in self.digests:
                found |= hmac.compare_digest(digest, known) and bool(key.strip())
        return found


def _bearer(value: bytes) -> bytes:
    """The key of an Authorization header; none for another scheme."""
    scheme, _, key = value.partition(b" ")
    return key if scheme.lower() == b"bearer" else b""


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()
