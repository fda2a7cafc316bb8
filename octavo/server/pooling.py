"""What embeddings, rerank and score share: texts to token ids, a run on the engine, counts, and one end.

The routes answer once, with everything; a client that goes away ends its work in the engine.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any, TypeVar

from starlette.responses import Response
from starlette.types import Receive, Scope

from octavo.errors import RequestError
from octavo.frontend.pooling import (
    check_embedding_input,
    closing_tokens,
    embedding_config,
    pooling_params,
    resolve_truncation,
    truncate_beginning,
)
from octavo.server.generation import EventStream, GenerationEndpoint
from octavo.server.schemas_pooling import PoolingRequest, PoolingUsage
from octavo.types import PoolingParams

T = TypeVar("T")

MAX_INPUTS = 2048  # texts in one request: OpenAI's limit, too


@dataclass(frozen=True, slots=True)
class Input:
    """One text, or the token ids that came for it. ``name``: its place in the request, for errors."""

    name: str
    content: str | list[int]


def split_inputs(value: str | list[Any], name: str) -> list[Input]:
    """A text, a list of texts, token ids, or a list of lists of token ids. RequestError for none, too many, and mixed kinds."""
    if isinstance(value, str):
        return [Input(name, value)]
    kinds = {type(item) for item in value}
    if len(kinds) > 1:
        raise RequestError(f"{name} mixes kinds; send a text, a list of texts, token ids, or a list of lists of token ids.", param=name)
    if not value:
        raise RequestError(f"{name} must not be empty.", param=name)
    if kinds == {int}:
        return [Input(name, value)]
    check_count(len(value), name)
    return [Input(f"{name}[{i}]", item) for i, item in enumerate(value)]


def check_count(count: int, name: str) -> None:
    if count > MAX_INPUTS:
        raise RequestError(f"{name} takes at most {MAX_INPUTS} entries, got {count}; send several requests.", param=name)


class PoolingEndpoint(GenerationEndpoint):
    """Subclasses say how a body becomes inputs and vectors an answer (``respond``)."""

    async def _serve(self, body: bytes, scope: Scope, receive: Receive, events: EventStream, start: float) -> None:
        answer = await self.respond(body, scope, start)
        await Response(answer, media_type="application/json")(scope, receive, events.send)

    async def respond(self, body: bytes, scope: Scope, start: float) -> bytes:
        raise NotImplementedError

    def params(self, request: PoolingRequest, *, dimensions: int | None = None, normalize: bool | None = None) -> PoolingParams:
        """RequestError when this server does not embed, or not like that; EngineDeadError when it cannot."""
        engine = self.context.engine
        params = pooling_params(engine.roles, engine.model_config, dimensions=dimensions, normalize=normalize)
        self.context.check_healthy()
        self.context.check_priority(request.priority)
        return params

    async def tokenize(self, inputs: list[Input], request: PoolingRequest) -> list[list[int]]:
        """Checked token ids of every input, in order. RequestError names the first that cannot be served."""
        engine = self.context.engine
        embedding_config(engine.roles)
        keep = resolve_truncation(request.truncate_prompt_tokens, engine.max_model_len)
        texts = [i.content for i in inputs if isinstance(i.content, str)]
        if texts and len(texts) < len(inputs):
            raise AssertionError("inputs are all texts or all token ids")
        closing = 0
        if not texts:
            if request.add_special_tokens:
                raise RequestError("add_special_tokens works on texts; this input is token ids.", param="add_special_tokens")
            token_ids: list[list[int]] = [i.content for i in inputs]  # type: ignore[misc]
        else:
            special = request.add_special_tokens is not False
            token_ids = await self._encode(texts, special)  # type: ignore[arg-type]
            closing = closing_tokens(engine.tokenizer) if keep is not None and special else 0
        token_ids = [truncate_beginning(ids, keep, closing) for ids in token_ids]
        for entry, ids in zip(inputs, token_ids, strict=True):
            check_embedding_input(ids, entry.name, max_model_len=engine.max_model_len, vocab_size=engine.vocab_size)
        return token_ids

    async def _encode(self, texts: list[str], special: bool) -> list[list[int]]:
        tokenizer = self.context.engine.tokenizer
        if tokenizer is None:
            raise RequestError("This server has no tokenizer (--skip-tokenizer-init): send token ids.")
        return await self.context.off_loop(sum(map(len, texts)), tokenizer.encode_batch, texts, special)

    async def run(
        self, token_ids: list[list[int]], params: PoolingParams, request: PoolingRequest, scope: Scope, start: float
    ) -> tuple[list[bytes], PoolingUsage]:
        """The vectors, in order, and the usage. Counts each input as a finished, aborted or failed request."""
        metrics = self.context.metrics
        name = self.context.engine_request_id(self.response_id(request, scope))
        reason = "abort"
        try:
            vectors = await self.context.engine.embed(token_ids, params, request_id=name, priority=request.priority or 0)
            reason = "stop"
        except Exception:
            reason = "error"
            raise
        finally:
            seconds = time.monotonic() - start
            for ids in token_ids:
                metrics.observe_finished(reason, seconds, len(ids), 0)
        total = sum(map(len, token_ids))
        usage = scope["octavo.usage"] = PoolingUsage(total, total)
        return vectors, usage
