"""POST /v1/rerank and /v1/score: how similar texts are, by the cosine of their vectors."""

from __future__ import annotations

import time

import msgspec
from starlette.types import Scope

from octavo.errors import RequestError
from octavo.frontend.pooling import cosine_pairs
from octavo.server.context import ServerContext
from octavo.server.limits import decode
from octavo.server.openapi import document
from octavo.server.pooling import Input, PoolingEndpoint, check_count, split_inputs
from octavo.server.schemas_pooling import (
    Document,
    Ranked,
    Ranking,
    RerankRequest,
    ScoreEntry,
    ScoreRequest,
    Scores,
    rerank_decoder,
    score_decoder,
)


class RerankEndpoint(PoolingEndpoint):
    """``cohere``: as Cohere's second version answers, which gives documents back only if they are asked for."""

    id_prefix = "rerank-"

    def __init__(self, context: ServerContext, *, cohere: bool = False) -> None:
        super().__init__(context)
        self.cohere = cohere

    async def respond(self, body: bytes, scope: Scope, start: float) -> bytes:
        request: RerankRequest = decode(rerank_decoder, body)
        model = self.context.check_model(request.model)
        params = self.params(request, normalize=True)
        documents = [d if isinstance(d, str) else d.text for d in request.documents]
        if not documents:
            raise RequestError("documents must not be empty.", param="documents")
        check_count(len(documents), "documents")
        if request.top_n is not None and request.top_n < 1:
            raise RequestError(f"top_n must be at least 1, got {request.top_n}.", param="top_n")
        keep = request.max_tokens_per_doc
        if keep is not None:
            if request.truncate_prompt_tokens is not None:
                raise RequestError("max_tokens_per_doc and truncate_prompt_tokens say the same; send one.", param="max_tokens_per_doc")
            if keep < 1:
                raise RequestError(f"max_tokens_per_doc must be at least 1, got {keep}.", param="max_tokens_per_doc")
            request.truncate_prompt_tokens = min(keep, self.context.engine.max_model_len)
        inputs = [Input("query", request.query), *(Input(f"documents[{i}]", d) for i, d in enumerate(documents))]
        token_ids = await self.tokenize(inputs, request)
        vectors, usage = await self.run(token_ids, params, request, scope, start)
        scores = await self.context.off_loop(sum(map(len, vectors)) // 64, cosine_pairs, vectors[:1], vectors[1:])
        order = sorted(range(len(scores)), key=lambda i: -scores[i])[: request.top_n]
        wanted = not self.cohere if request.return_documents is None else request.return_documents
        results = [Ranked(i, scores[i], Document(documents[i]) if wanted else None) for i in order]
        meta = {"api_version": {"version": "2"}, "billed_units": {"search_units": 1}} if self.cohere else None
        return msgspec.json.encode(Ranking(self.response_id(request, scope), model, results, usage, meta))


class ScoreEndpoint(PoolingEndpoint):
    id_prefix = "score-"

    async def respond(self, body: bytes, scope: Scope, start: float) -> bytes:
        request: ScoreRequest = decode(score_decoder, body)
        model = self.context.check_model(request.model)
        params = self.params(request, normalize=True)
        first, second = split_inputs(request.text_1, "text_1"), split_inputs(request.text_2, "text_2")
        if len(first) not in (1, len(second)):
            raise RequestError(
                f"{len(first)} text_1 can't be paired with {len(second)} text_2; send one text_1, or as many as text_2.", param="text_1"
            )
        if isinstance(first[0].content, str) != isinstance(second[0].content, str):
            raise RequestError("text_1 and text_2 must both be texts, or both token ids.", param="text_2")
        check_count(len(first) + len(second), "text_1 and text_2 together")
        token_ids = await self.tokenize([*first, *second], request)
        vectors, usage = await self.run(token_ids, params, request, scope, start)
        size = sum(map(len, vectors)) // 64
        scores = await self.context.off_loop(size, cosine_pairs, vectors[: len(first)], vectors[len(first) :])
        data = [ScoreEntry(i, "score", s) for i, s in enumerate(scores)]
        return msgspec.json.encode(Scores(self.response_id(request, scope), "list", int(time.time()), model, data, usage))


for _path in ("/v1/rerank", "/rerank", "/v2/rerank"):
    document("POST", _path, summary="Documents sorted by similarity to a query.", request=RerankRequest, response=Ranking)
for _path in ("/v1/score", "/score"):
    document("POST", _path, summary="Similarity of pairs of texts.", request=ScoreRequest, response=Scores)
