"""The API's description: /openapi.json and the page /docs, made from the structs that requests are decoded with.

A route is described where it is defined: ``document("POST", "/v1/things", request=ThingRequest, response=Thing, …)`` at the
module's end, or ``@documented(…)`` on an endpoint class. ``openapi_document`` describes those that an app serves; a test
walks the routes, and fails for one that nobody described.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, TypeVar

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route

from octavo.server import answer_schemas as answers
from octavo.server.errors import ErrorBody
from octavo.server.fields import RANGES, field_note

T = TypeVar("T")

_REF = "#/components/schemas/{name}"
JSON = "application/json"


@dataclass(frozen=True)
class Operation:
    """One method of one path. ``path`` as in the app's route.

    request, response: types that msgspec knows; None for no body. stream: the type of a server-sent event's data, for
    operations that answer as a stream with ``stream: true``. media: of the response, when it is not JSON. error: the type of
    what is said when something was wrong.
    """

    method: str
    path: str
    summary: str
    request: Any = None
    response: Any = None
    stream: Any = None
    media: tuple[str, ...] = (JSON,)
    error: Any = ErrorBody

    @property
    def tag(self) -> str:
        if self.path.startswith("/v1/messages"):
            return "Anthropic"
        return "OpenAI" if self.path.startswith("/v1/") else "Server"


OPERATIONS: dict[tuple[str, str], Operation] = {}


def document(
    method: str,
    path: str,
    *,
    summary: str,
    request: Any = None,
    response: Any = None,
    stream: Any = None,
    media: tuple[str, ...] = (JSON,),
    error: Any = ErrorBody,
) -> None:
    """Describe an operation; a second description of the same one replaces the first."""
    OPERATIONS[method, path] = Operation(method, path, summary, request, response, stream, media, error)


def documented(method: str, path: str, **description: Any) -> Callable[[T], T]:
    """``document`` as a decorator of the endpoint."""

    def describe(endpoint: T) -> T:
        document(method, path, **description)
        return endpoint

    return describe


def methods_of(route: Route) -> list[str]:
    """GET or POST …; HEAD and OPTIONS come with GET and need no description. An endpoint class without a list takes POST."""
    return sorted((route.methods or {"POST"}) - {"HEAD", "OPTIONS"})


def served(routes: Iterable[BaseRoute]) -> Iterator[Operation]:
    """The described operations of an app, in the order of its routes."""
    for route in routes:
        if isinstance(route, Route):
            for method in methods_of(route):
                operation = OPERATIONS.get((method, route.path))
                if operation is not None:
                    yield operation


def openapi_document(
    routes: Iterable[BaseRoute], *, version: str, needs_key: bool = False, open_paths: Iterable[str] = ()
) -> dict[str, Any]:
    """An OpenAPI 3.1 document of the routes. ``needs_key``: all but ``open_paths`` want an API key."""
    operations = list(served(routes))
    types = [t for o in operations for t in (o.request, o.response, o.stream, o.error) if t is not None]
    schemas, components = msgspec.json.schema_components(types, ref_template=_REF)
    schema_of = {id(t): schema for t, schema in zip(types, schemas)}
    _describe_fields(types, components)
    opened = set(open_paths)
    paths: dict[str, Any] = {}
    for operation in operations:
        described = _operation(operation, lambda t: schema_of[id(t)])
        if needs_key and operation.path in opened:
            described["security"] = []
        paths.setdefault(_template(operation.path), {})[operation.method.lower()] = described
    result: dict[str, Any] = {
        "openapi": "3.1.0",
        "info": {
            "title": "Octavo",
            "version": version,
            "description": "A server for large language models that speaks OpenAI's and Anthropic's APIs. Fields that are not "
            "theirs have vLLM's names and meanings. Unknown fields are refused; null means not set.",
        },
        "paths": paths,
        "components": {"schemas": components},
    }
    if needs_key:
        result["components"]["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
        result["security"] = [{"key": []}]
    return result


def _template(path: str) -> str:
    """Starlette's ``/v1/models/{name:path}`` -> ``/v1/models/{name}``."""
    return re.sub(r"\{(\w+):\w+\}", r"{\1}", path)


def _operation(operation: Operation, schema_of: Callable[[Any], Any]) -> dict[str, Any]:
    result: dict[str, Any] = {
        "summary": operation.summary,
        "tags": [operation.tag],
        "operationId": operation.method.lower() + re.sub(r"\W+", "_", _template(operation.path)).rstrip("_"),
    }
    names = re.findall(r"\{(\w+)", operation.path)
    if names:
        result["parameters"] = [{"name": name, "in": "path", "required": True, "schema": {"type": "string"}} for name in names]
    if operation.request is not None:
        result["requestBody"] = {"required": True, "content": {JSON: {"schema": schema_of(operation.request)}}}
    error = {"description": "What was wrong", "content": {JSON: {"schema": schema_of(operation.error)}}}
    content: dict[str, Any] = {}
    for media in operation.media:
        if media == JSON and operation.response is not None:
            content[media] = {"schema": schema_of(operation.response)}
        elif media != JSON:
            content[media] = {"schema": {"type": "string"}}
    if operation.stream is not None:
        # As OpenAPI 3.2 has it; readers of 3.1 pass it over. One event as an object, whose data is JSON (or the word [DONE]).
        data = {"type": "string", "contentMediaType": JSON, "contentSchema": schema_of(operation.stream)}
        content["text/event-stream"] = {"itemSchema": {"type": "object", "required": ["data"], "properties": {"data": data}}}
    ok: dict[str, Any] = {"description": "OK"}
    if content:
        ok["content"] = content
    result["responses"] = {"200": ok, "4XX": error, "5XX": {**error, "description": "A fault of the server, or it is stopping"}}
    return result


def _describe_fields(types: list[Any], components: dict[str, Any]) -> None:
    """Every field of a request tells what it does, or why it is refused or without effect."""
    for schema in types:
        name = getattr(schema, "__name__", "")
        for field, described in components.get(name, {}).get("properties", {}).items():
            note = field_note(schema, field)
            if note and "$ref" not in described:
                described["description"] = note
            for option in described.get("anyOf", ()):
                if note and option.get("type") in ("integer", "number"):
                    option.update(RANGES.get(field, {}))


class DocumentationRoutes:
    """/openapi.json and /docs of the app that serves them. The page is one file: no other host is asked for anything."""

    def __init__(self, version: str, needs_key: bool, open_paths: Iterable[str]) -> None:
        self.version = version
        self.needs_key = needs_key
        self.open_paths = tuple(open_paths)
        self._body: bytes | None = None

    async def openapi(self, request: Request) -> Response:
        if self._body is None:  # once: the routes don't change
            routes = request.app.routes
            content = openapi_document(routes, version=self.version, needs_key=self.needs_key, open_paths=self.open_paths)
            self._body = msgspec.json.encode(content)
        return Response(self._body, media_type=JSON)

    async def page(self, request: Request) -> Response:
        from octavo.server.docs_page import CONTENT_SECURITY_POLICY, PAGE

        return Response(PAGE, media_type="text/html", headers={"content-security-policy": CONTENT_SECURITY_POLICY})


document("GET", "/openapi.json", summary="This description.", response=answers.OpenApiDocument)
document("GET", "/docs", summary="This description as a page.", media=("text/html",))
