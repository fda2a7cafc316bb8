"""The small routes: models, health, version, metrics, tokenize and detokenize."""

from __future__ import annotations

from typing import Any, TypeVar

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from octavo import __version__
from octavo.errors import RequestError
from octavo.frontend.params import check_ids
from octavo.server.context import ServerContext
from octavo.server.limits import decode, read_body
from octavo.server.prompts import chat_prompt, encode
from octavo.server.schemas import TokenizeRequest, detokenize_decoder, tokenize_decoder
from octavo.server.tools import template_tools

T = TypeVar("T")

INDEX = """Octavo {version} runs here{serves}.

It speaks OpenAI's API. The base URL for clients is this address followed by /v1.

    POST /v1/chat/completions    chat, also as a stream; /v1/responses and Anthropic's /v1/messages do the same
    POST /v1/completions         text completion
    POST /v1/embeddings          vectors of texts; /v1/rerank and /v1/score compare them
    GET  /v1/models              the names to ask for
    POST /tokenize, /detokenize  text to token ids, and back
    GET  /health, /ping          200 while the engine lives
    GET  /metrics                for Prometheus
    GET  /docs                   every route and field

In a terminal: octavo chat --url (this address)/v1
"""


def json_response(content: Any) -> Response:
    return Response(msgspec.json.encode(content), media_type="application/json")


class UtilityRoutes:
    """Handlers that need nothing but the context."""

    def __init__(self, context: ServerContext) -> None:
        self.context = context

    async def index(self, request: Request) -> Response:
        """What runs here, and where to send requests. Names no model where a key is wanted: the web page makes this path an open one."""
        serves = "" if self.context.options.api_key else f" and serves {', '.join(self.context.model_names)}"
        return Response(INDEX.format(version=__version__, serves=serves), media_type="text/plain")

    async def health(self, request: Request) -> Response:
        """200 while the engine lives and answers, else 503."""
        self.context.check_healthy()
        return json_response({"status": "ok"})

    async def ping(self, request: Request) -> Response:
        """/health for those that ask for /ping, and want no body (SageMaker)."""
        await self.health(request)
        return Response(status_code=200)

    async def load(self, request: Request) -> Response:
        """How many requests run or wait here: for load balancers."""
        return json_response({"server_load": self.context.engine.num_unfinished})

    async def version(self, request: Request) -> Response:
        return json_response({"version": __version__})

    async def metrics(self, request: Request) -> Response:
        self.context.metrics.observe_stats(self.context.engine.stats)
        body, content_type = self.context.metrics.render()
        return Response(body, headers={"content-type": content_type})

    async def models(self, request: Request) -> Response:
        return json_response({"object": "list", "data": [self._card(name) for name in self.context.model_names]})

    async def model(self, request: Request) -> Response:
        return json_response(self._card(self.context.check_model(request.path_params["name"])))

    def _card(self, name: str) -> dict[str, Any]:
        return {
            "id": name,
            "object": "model",
            "created": self.context.created,
            "owned_by": "octavo",
            "root": self.context.model_names[0],
            "parent": None,
            "max_model_len": self.context.engine.max_model_len,
        }

    async def tokenize(self, request: Request) -> Response:
        sent = await self._decode(request, tokenize_decoder)
        self.context.check_model(sent.model)
        if (sent.prompt is None) == (sent.messages is None):
            raise RequestError("Send either prompt or messages.", param="prompt")
        if sent.messages is not None:
            tokens = (await chat_prompt(sent, self.context, template_tools(sent.tools))).token_ids
        else:
            self._refuse_chat_fields(sent)
            tokens = (await encode(self.context, [sent.prompt or ""], sent.add_special_tokens is not False))[0]
        answer: dict[str, Any] = {"count": len(tokens), "max_model_len": self.context.engine.max_model_len, "tokens": tokens}
        answer["token_strs"] = [msgspec.Raw(self.context.texts.legacy[token][0]) for token in tokens] if sent.return_token_strs else None
        return json_response(answer)

    def _refuse_chat_fields(self, sent: TokenizeRequest) -> None:
        for name in ("add_generation_prompt", "continue_final_message", "chat_template", "chat_template_kwargs", "tools"):
            if getattr(sent, name) is not None:
                raise RequestError(f"{name} works on messages; this request has a prompt.", param=name)

    async def detokenize(self, request: Request) -> Response:
        sent = await self._decode(request, detokenize_decoder)
        self.context.check_model(sent.model)
        check_ids("tokens", sent.tokens, self.context.engine.vocab_size)
        tokenizer = self.context.engine.tokenizer
        if tokenizer is None:
            raise RequestError("This server has no tokenizer (--skip-tokenizer-init).")
        text = await self.context.off_loop(4 * len(sent.tokens), lambda: tokenizer.decode(sent.tokens, skip_special_tokens=False))
        return json_response({"prompt": text})

    async def _decode(self, request: Request, decoder: msgspec.json.Decoder[T]) -> T:
        return decode(decoder, await read_body(request.scope, request.receive, self.context.options.max_body_size))
