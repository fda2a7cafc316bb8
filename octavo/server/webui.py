"""The web page at ``/``: static files out of ``octavo/server/web``, read once, with a policy that lets nothing else run.

The page is plain HTML, CSS and ES modules: no build step, no other host. It holds no secret and no name of a model, so
it is open where API keys are asked for; what it shows it fetches with the key that the reader types in.
"""

from __future__ import annotations

import hashlib
from collections.abc import Awaitable, Callable
from pathlib import Path

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

FOLDER = Path(__file__).parent / "web"
TYPES = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
    ".webmanifest": "application/manifest+json",
}
# Scripts, styles and requests only from and to this server, no inline code, no frames around the page, and no way to turn a
# string into markup (Trusted Types without a policy): what a model writes can only ever become text.
POLICY = "; ".join(
    (
        "default-src 'none'",
        "script-src 'self'",
        "style-src 'self'",
        "img-src 'self'",
        "connect-src 'self'",
        "manifest-src 'self'",
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
        "require-trusted-types-for 'script'",
        "trusted-types 'none'",
    )
)
HEADERS = {
    "Content-Security-Policy": POLICY,
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-cache",  # asked for again each time, and answered with 304 unless it changed
}

Handler = Callable[[Request], Awaitable[Response]]


class WebPage:
    """The page's routes. ``text_index`` answers clients of ``/`` that do not ask for HTML, such as curl.

    Only the files that were there at the start are served, each by its own route: no path is ever made from a request.
    """

    def __init__(self, text_index: Handler) -> None:
        self.text_index = text_index
        files = sorted(f for f in FOLDER.iterdir() if f.suffix in TYPES)
        page = FOLDER / "index.html"
        self.routes = [Route("/", self._index(_sender(page)))]
        self.routes += [Route(f"/web/{f.name}", _sender(f)) for f in files if f != page]

    def _index(self, send_page: Handler) -> Handler:
        async def index(request: Request) -> Response:
            # Under a prefix (--root-path) the page must end with a slash, for all that it names is relative to it.
            written = request.scope.get("raw_path", b"").split(b"?")[0].decode("latin-1")
            if written and not written.endswith("/"):
                return Response(status_code=307, headers={"Location": f"./{written.rsplit('/', 1)[-1]}/"})
            response = await (send_page if "text/html" in request.headers.get("accept", "") else self.text_index)(request)
            response.headers["Vary"] = "Accept"
            return response

        return index


def _sender(file: Path) -> Handler:
    body = file.read_bytes()
    headers = {**HEADERS, "ETag": f'"{hashlib.sha256(body).hexdigest()[:32]}"'}
    media_type = TYPES[file.suffix]

    async def send(request: Request) -> Response:
        if request.headers.get("if-none-match") == headers["ETag"]:
            return Response(status_code=304, headers=headers)
        return Response(body, headers=headers, media_type=media_type)

    return send
