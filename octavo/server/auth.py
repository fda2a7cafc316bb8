"""API keys: deny by default, compare in constant time."""

from __future__ import annotations

import hashlib
import hmac
import re
from collections.abc import Iterable

from starlette.types import ASGIApp, Receive, Scope, Send

from octavo.server.messages_errors import refusal_for

# All that is open: whether the server lives, and pages that hold no data: how to call it, and the web page's own files.
OPEN_PATHS = frozenset({"/health", "/ping", "/", "/docs"})
OPEN_FILES = re.compile(r"/web/[A-Za-z0-9_-]+(\.[A-Za-z0-9_-]+)*(/[A-Za-z0-9_-]+(\.[A-Za-z0-9_-]+)*)*")
READING = frozenset({"GET", "HEAD"})


class ApiKeyMiddleware:
    """Let a request through only with ``Authorization: Bearer KEY``, or Anthropic's ``x-api-key: KEY``, for one of ``keys``, on
    every path but the open ones.

    Works on the path before routing, so a route added later is closed unless it is named here; open paths are open to be
    read only. ``also_open`` are further ones. Keys are compared as digests of equal length, and always against all
    keys: the time taken says nothing about any of them. ``scope["octavo.key"]`` is then the number of the key.
    """

    def __init__(self, app: ASGIApp, keys: Iterable[str], also_open: frozenset[str] = frozenset()) -> None:
        self.app = app
        self.digests = [_digest(key.encode()) for key in keys]
        self.open_paths = OPEN_PATHS | also_open

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self.app(scope, receive, send)
            return
        if scope["type"] != "http":
            raise RuntimeError(f"There is no {scope['type']} here.")  # and none without a key, should there ever be one
        key = self.key_of(scope["headers"])
        if key is None and not self.is_open(scope["method"], scope["path"]):
            # LiteLLM tells this from a bad request by OpenAI's first words.
            message = "Incorrect API key provided, or none; send it as 'Authorization: Bearer KEY'."
            headers = {"WWW-Authenticate": "Bearer"}
            await refusal_for(scope["path"], message, 401, code="invalid_api_key", headers=headers)(scope, receive, send)
            return
        scope["octavo.key"] = key or 0
        await self.app(scope, receive, send)

    def is_open(self, method: str, path: str) -> bool:
        return method in READING and (path in self.open_paths or OPEN_FILES.fullmatch(path) is not None)

    def key_of(self, headers: Iterable[tuple[bytes, bytes]]) -> int | None:
        """The number of the key that a request brings, or None.

        One header of a kind at most; a client may send both kinds, and one right key is enough.
        """
        bearers = [value for name, value in headers if name == b"authorization"]
        plain = [value for name, value in headers if name == b"x-api-key"]
        if len(bearers) > 1 or len(plain) > 1:
            return None
        found = -1
        for key in (*(_bearer(value) for value in bearers), *plain):
            digest = _digest(key.strip())
            for number, known in enumerate(self.digests):
                found = (found, number)[hmac.compare_digest(digest, known) and bool(key.strip())]
        return None if found < 0 else found


def _bearer(value: bytes) -> bytes:
    """The key of an Authorization header; none for another scheme."""
    scheme, _, key = value.partition(b" ")
    return key if scheme.lower() == b"bearer" else b""


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()
