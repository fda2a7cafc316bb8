"""A server behind a proxy that gives it a path of its own, such as /llm."""

from __future__ import annotations

from starlette.types import ASGIApp, Receive, Scope, Send


def normal_root(path: str) -> str:
    """``llm/`` -> ``/llm``; "" stays."""
    path = path.strip("/")
    return f"/{path}" if path else ""


class RootPathMiddleware:
    """Take ``prefix`` off the path, once; a proxy that has taken it off itself is as welcome.

    It stands before everything that looks at paths, keys above all: those see the same path whichever way it was written.
    """

    def __init__(self, app: ASGIApp, prefix: str) -> None:
        self.app = app
        self.prefix = prefix

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            path = scope["path"]
            if path == self.prefix or path.startswith(self.prefix + "/"):
                scope = {**scope, "path": path[len(self.prefix) :] or "/"}
        await self.app(scope, receive, send)
