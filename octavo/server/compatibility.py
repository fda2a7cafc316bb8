"""docs/compatibility.md, out of the routes' descriptions and the fields' lines: ``python -m octavo.server.compatibility --write``."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

from octavo.server.fields import fields_of
from octavo.server.messages_input import CountTokensRequest, MessagesRequest
from octavo.server.not_served import NOT_SERVED
from octavo.server.openapi import Operation, served
from octavo.server.responses_input import ResponsesRequest
from octavo.server.schemas import ChatRequest, CompletionRequest, DetokenizeRequest, TokenizeRequest
from octavo.server.schemas_pooling import EmbeddingsRequest, RerankRequest, ScoreRequest

PAGE = Path("docs/compatibility.md")
SCHEMAS = {
    "POST /v1/chat/completions": ChatRequest,
    "POST /v1/responses": ResponsesRequest,
    "POST /v1/messages": MessagesRequest,
    "POST /v1/messages/count_tokens": CountTokensRequest,
    "POST /v1/completions": CompletionRequest,
    "POST /v1/embeddings": EmbeddingsRequest,
    "POST /v1/rerank, /v2/rerank, /rerank": RerankRequest,
    "POST /v1/score, /score": ScoreRequest,
    "POST /tokenize": TokenizeRequest,
    "POST /detokenize": DetokenizeRequest,
}
HEAD = """# Compatibility

Made by `python -m octavo.server.compatibility --write` from the schemas that requests are decoded with; do not edit it by hand.

A field is **supported**; or **accepted** without effect, because clients send it and no token depends on it; or
**refused** by name with a 400, unless its value asks for nothing (null, an empty list, the API's default). Every other field is
unknown, and refused with the nearest known name. `null` means not set. Fields marked OpenAI or Anthropic are in that API's own
schemas; the others have vLLM's names and meanings. [clients.md](clients.md) says which clients are tested.
"""
# Whose API a route is, where it isn't OpenAI's.
ANTHROPIC = (MessagesRequest, CountTokensRequest)


def page(operations: Iterable[Operation]) -> str:
    return "\n".join(_lines(list(operations))) + "\n"


def _lines(operations: list[Operation]) -> Iterator[str]:
    yield HEAD
    yield "## Routes"
    yield ""
    yield "| route | does |"
    yield "| --- | --- |"
    for operation in operations:
        stream = " Also as a stream." if operation.stream is not None else ""
        yield f"| {operation.method} {operation.path.replace(':path', '')} | {operation.summary}{stream} |"
    yield ""
    yield "Not served, nor what is under them; the 404 says so:"
    yield ""
    for routes, why in NOT_SERVED:
        yield f"- {', '.join(routes)}: {why}"
    for title, schema in SCHEMAS.items():
        yield ""
        yield f"## {title}"
        yield ""
        yield f"| field | | {'Anthropic' if schema in ANTHROPIC else 'OpenAI'} | |"
        yield "| --- | --- | --- | --- |"
        order = {"supported": 0, "accepted": 1, "refused": 2}
        for field in sorted(fields_of(schema), key=lambda f: order[f.status]):
            note = field.note.replace("|", "\\|")
            yield f"| `{field.name}` | {field.status} | {'yes' if field.official else ''} | {note} |"


def current_page() -> str:
    """The page for the routes that an app serves with default options."""
    from octavo.config import ServerOptions
    from octavo.server.app import create_app
    from octavo.server.mock import MockEngine

    return page(served(create_app(MockEngine(), ServerOptions(), ["model"]).routes))


if __name__ == "__main__":
    text = current_page()
    if "--write" in sys.argv:
        PAGE.write_text(text, encoding="utf-8")
    else:
        print(text, end="")
