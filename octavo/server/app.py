"""The ASGI application: routes inside, then API keys, then request ids, log lines and the last resort for errors."""

from __future__ import annotations

import logging
import re
import time
from collections.abc import Iterable
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

import octavo.server.described  # noqa: F401 (fills in the routes' descriptions)
from octavo import __version__
from octavo.config import ServerOptions
from octavo.errors import EngineDeadError, RequestError
from octavo.metrics.cells import Cells
from octavo.metrics.prometheus import Metrics
from octavo.server.auth import OPEN_PATHS, ApiKeyMiddleware
from octavo.server.chat_endpoint import ChatEndpoint
from octavo.server.completions import CompletionEndpoint
from octavo.server.context import ServerContext, ServerEngine, new_request_id
from octavo.server.embeddings import EmbeddingsEndpoint
from octavo.server.errors import response_for
from octavo.server.limits import ClientDisconnect
from octavo.server.messages import CountTokensEndpoint, MessagesEndpoint
from octavo.server.messages_errors import is_messages_path, refusal_for
from octavo.server.not_served import why_not_served
from octavo.server.openapi import DocumentationRoutes
from octavo.server.quota import KeyLimitMiddleware, KeyLimits
from octavo.server.rerank import RerankEndpoint, ScoreEndpoint
from octavo.server.responses import ResponsesEndpoint
from octavo.server.root_path import RootPathMiddleware, normal_root
from octavo.server.routes import UtilityRoutes
from octavo.server.webui import WebPage

access_logger = logging.getLogger("octavo.access")

# Asked for each second by the web page and by monitors: logged only when something is wrong, or at --log-level debug.
_QUIET = re.compile(r"/(health|metrics|web/[^/]+)")
_REQUEST_ID = re.compile(rb"[\x21-\x7e]{1,128}")
_ID_RULE = "only 1 to 128 visible ASCII characters are taken"


class RequestMiddleware:
    """Give every request an id (the client's X-Request-Id, if it is a sane one), and log one line when it has ended.

    The line has neither the query string, nor the body, nor any header. Also the last resort: an exception that nobody
    mapped becomes a JSON 500 here.
    """

    def __init__(self, app: ASGIApp, log: bool) -> None:
        self.app = app
        self.log = log

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        sent = next((value for name, value in scope["headers"] if name == b"x-request-id"), b"")
        request_id = sent if _REQUEST_ID.fullmatch(sent) else new_request_id().encode()
        scope["octavo.request_id"] = request_id.decode()
        if sent and request_id is not sent:
            # Replaced, not refused: proxies write this header, and their clients can do nothing about it.
            access_logger.debug("X-Request-Id %r (%d bytes) is replaced by %s: %s", sent[:128], len(sent), request_id.decode(), _ID_RULE)
        start = time.monotonic()
        status = 0

        def send_with_id(message: Message) -> Any:
            if message["type"] == "http.response.start":
                nonlocal status
                status = message["status"]
                message["headers"].append((b"x-request-id", request_id))
                if is_messages_path(scope["path"]):
                    message["headers"].append((b"request-id", request_id))  # the name that Anthropic's clients look for
            return send(message)

        scope["octavo.send"] = send  # for the chunks of streams, which need nothing of what is in between
        try:
            await self.app(scope, receive, send_with_id)
        except ClientDisconnect:
            scope["octavo.disconnected"] = True
        except Exception as error:  # noqa: BLE001 (whatever it is, the client gets an answer)
            response = response_for(error)
            if not status:
                await response(scope, receive, send_with_id)
        finally:
            if self.log:
                self._log(scope, status, time.monotonic() - start)

    def _log(self, scope: Scope, status: int, seconds: float) -> None:
        level = logging.DEBUG if status < 400 and _QUIET.fullmatch(scope["path"]) else logging.INFO
        if not access_logger.isEnabledFor(level):
            return
        host, port = scope.get("client") or ("-", 0)
        path = scope.get("raw_path", b"").split(b"?")[0][:200].decode("ascii", "replace")
        usage = scope.get("octavo.usage")
        tokens = f" prompt={usage.prompt_tokens} generated={usage.completion_tokens}" if usage is not None else ""
        gone = " client disconnected" if scope.get("octavo.disconnected") else ""
        line = '%s:%d "%s %s" %s %.1f ms id=%s%s%s'
        request_id, milliseconds = scope["octavo.request_id"], 1e3 * seconds
        access_logger.log(level, line, host, port, scope["method"], path, status or "-", milliseconds, request_id, tokens, gone)


def create_app(
    engine: ServerEngine,
    options: ServerOptions,
    model_names: Iterable[str],
    *,
    metrics: Metrics | None = None,
    scheduling_policy: str | None = None,
    cells: Cells | None = None,
) -> Starlette:
    """The application that serves ``engine`` under ``model_names`` (the first is the default). Starts nothing.

    ``cells``: the numbers that it shares with the server's other HTTP processes.
    """
    names = tuple(model_names)
    cells = cells or Cells()
    metrics = metrics or Metrics(names[0], cells)
    metrics.observe_ready(engine.ready)
    context = ServerContext(engine, options, names, metrics, scheduling_policy)
    utility = UtilityRoutes(context)
    documentation = DocumentationRoutes(__version__, bool(options.api_key), OPEN_PATHS)
    context.parsers  # noqa: B018 (flags that don't fit the model are errors at the start)
    page = None if options.disable_web_ui else WebPage(utility.index)
    routes = [
        *([Route("/", utility.index)] if page is None else page.routes),
        Route("/v1/chat/completions", ChatEndpoint(context), methods=["POST"]),
        Route("/v1/responses", ResponsesEndpoint(context), methods=["POST"]),
        Route("/v1/messages", MessagesEndpoint(context), methods=["POST"]),
        Route("/v1/messages/count_tokens", CountTokensEndpoint(context), methods=["POST"]),
        Route("/v1/completions", CompletionEndpoint(context), methods=["POST"]),
        *pooling_routes(context),
        Route("/v1/models", utility.models),
        Route("/v1/models/{name:path}", utility.model),
        Route("/health", utility.health),
        Route("/ping", utility.ping, methods=["GET", "POST"]),
        Route("/load", utility.load),
        Route("/version", utility.version),
        Route("/metrics", utility.metrics),
        Route("/openapi.json", documentation.openapi),
        Route("/docs", documentation.page),
        Route("/tokenize", utility.tokenize, methods=["POST"]),
        Route("/detokenize", utility.detokenize, methods=["POST"]),
    ]
    middleware = middleware_of(options, cells)
    app = Starlette(
        routes=routes,
        middleware=middleware,
        exception_handlers={HTTPException: _http_error, RequestError: _known_error, EngineDeadError: _known_error},
    )
    app.router.redirect_slashes = False
    app.state.context = context
    return app


def middleware_of(options: ServerOptions, cells: Cells) -> list[Middleware]:
    """From the outside in. Whatever is inside of the keys is closed without one; what browsers ask beforehand is outside."""
    layers = []
    if prefix := normal_root(options.root_path):
        layers.append(Middleware(RootPathMiddleware, prefix=prefix))
    layers.append(Middleware(RequestMiddleware, log=not options.disable_log_requests))
    if options.allowed_origins:
        layers.append(
            Middleware(
                CORSMiddleware,
                allow_origins=options.allowed_origins,
                allow_methods=options.allowed_methods,
                allow_headers=options.allowed_headers,
                allow_credentials=options.allow_credentials,
                expose_headers=("x-request-id", "retry-after"),
            )
        )
    if options.api_key:
        also_open = frozenset() if options.metrics_require_api_key else frozenset({"/metrics"})
        layers.append(Middleware(ApiKeyMiddleware, keys=options.api_key, also_open=also_open))
    if KeyLimits.wanted(options):
        layers.append(Middleware(KeyLimitMiddleware, limits=KeyLimits(options, max(len(options.api_key), 1), cells)))
    return layers


def pooling_routes(context: ServerContext) -> list[Route]:
    rerank, score = RerankEndpoint(context), ScoreEndpoint(context)
    return [
        Route("/v1/embeddings", EmbeddingsEndpoint(context), methods=["POST"]),
        Route("/v1/rerank", rerank, methods=["POST"]),
        Route("/rerank", rerank, methods=["POST"]),
        Route("/v2/rerank", RerankEndpoint(context, cohere=True), methods=["POST"]),
        Route("/v1/score", score, methods=["POST"]),
        Route("/score", score, methods=["POST"]),
    ]


async def _http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    path, code = request.url.path[:200], None
    if error.status_code == 404 and (why := why_not_served(path) or why_not_served(f"/v1{path}")):
        message, code = f"{path} is not offered by this server: {why}.", "unsupported_route"
    elif error.status_code == 404:
        message = f"There is nothing at {request.method} {path}; {_where_instead(request, path)}"
    elif error.status_code == 405:
        allowed = (error.headers or {}).get("Allow", "another method")
        message = f"{path} does not take {request.method}; use {allowed}."
    else:
        message = str(error.detail)
    return refusal_for(request.url.path, message, error.status_code, code=code, headers=dict(error.headers or {}))


def _where_instead(request: Request, path: str) -> str:
    """What a client that asked for the wrong path should do: most often its base URL lacks /v1, or has it twice."""
    routes = {route.path for route in request.app.routes if isinstance(route, Route)}
    near = path.removeprefix("/v1") if path.startswith("/v1/v1/") else f"/v1{path}"
    if near in routes:
        return f"did you mean {near}? The base URL for OpenAI's clients ends with one /v1."
    return "see /v1/models, /v1/chat/completions, /v1/completions: this server speaks OpenAI's API."


async def _known_error(request: Request, error: Exception) -> Response:
    return response_for(error)
