"""API keys: deny by default, compare in constant time."""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Iterable

from starlette.types import ASGIApp, Receive, Scope, Send

from octavo.server.errors import error_response

OPEN_PATHS = frozenset({"/health", "/ping", "/version", "/docs"})


class ApiKeyMiddleware:
    """Let a request through only with ``Authorization: Bearer KEY`` for one of ``keys``, on every path but ``open_paths``.

    Works on the path before routing, so a route added later is closed unless it is named here. Keys are compared as
    digests of equal length, and always against all keys: the time taken says nothing about any of them.
    """

    def __init__(self, app: ASGIApp, keys: Iterable[str], open_paths: frozenset[str] = OPEN_PATHS) -> None:
        self.app = app
        self.digests = [_digest(key.encode()) for key in keys]
        self.open_paths = open_paths

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["path"] not in self.open_paths and not self.allows(scope["headers"]):
            response = error_response(
                "Incorrect or missing API key; send it as 'Authorization: Bearer KEY'.",
                401,
                code="invalid_api_key",
                headers={"WWW-Authenticate": "Bearer"},
            )
            await response(scope, receive, send)
            return
        await self.app(scope, receive, send)

    def allows(self, headers: Iterable[tuple[bytes, bytes]]) -> bool:
        sent = [value for name, value in headers if name == b"authorization"]
        if len(sent) != 1:
            return False
        scheme, _, key = sent[0].partition(b" ")
        if scheme.lower() != b"bearer":
            return False
        digest = _digest(key.strip())
        found = False
        for known in self.digests:
            found |= hmac.compare_digest(digest, known)
        return found


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()
